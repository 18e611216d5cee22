"""A real browser, and in it pages of our html or a real JupyterLab.

    page = page_of(html, dark=True)              # html by itself; scripts=False: as if untrusted
    page = open_notebook(["1 + 1", cell_two])    # in JupyterLab, run to its end
    page = open_notebook(notebook, run=False)    # with the outputs it brings, untrusted
    page = open_notebook(cells, theme="dark")

Each page has `.errors` (uncaught script errors) and `.offsite` (requests that left this machine);
both are checked to be empty when the test ends, so that no test can forget to. One browser and one
JupyterLab serve all tests; each page has a context of its own, so nothing is shared by cookies
or storage.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or "/usr/bin/chromium"
ARTIFACTS = Path(__file__).with_name("artifacts")
PATIENCE = 60_000  # ms: two busy cores took 20 s to serve and 15 s more to show a notebook

Open = Callable[..., Page]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """One headless Chromium for all tests."""
    if not Path(CHROMIUM).exists():
        reason = "no Chromium: install Debian's package chromium (and fonts-dejavu-core)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=[
                "--no-sandbox",  # root, as in a container, has none
                "--disable-dev-shm-usage",  # /dev/shm is small there
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--no-first-run",
            ],
        )
        yield browser
        browser.close()


@pytest.fixture
def new_page(chromium: Browser) -> Iterator[Open]:
    """A function that gives an empty page with `.errors` and `.offsite`, watched until the test ends."""
    pages: list[Any] = []

    def new(dark: bool = False, scripts: bool = True) -> Page:
        context = chromium.new_context(
            viewport={"width": 1400, "height": 1000},
            color_scheme="dark" if dark else "light",
            java_script_enabled=scripts,
        )
        page: Any = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.errors, page.offsite = [], []
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.on("request", lambda request: _is_offsite(request.url) and page.offsite.append(request.url))
        page.on("websocket", lambda ws: _is_offsite(ws.url) and page.offsite.append(ws.url))
        pages.append(page)
        return page

    yield new
    for page in pages:
        page.context.close()
    assert [page.errors for page in pages] == [[] for _ in pages]
    assert [page.offsite for page in pages] == [[] for _ in pages]


def _is_offsite(url: str) -> bool:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme in ("http", "https", "ws", "wss") and parts.hostname not in ("127.0.0.1", "localhost")


@pytest.fixture
def page_of(new_page: Open) -> Open:
    """A page that holds the given html and nothing else."""

    def page_of(html: str, dark: bool = False, scripts: bool = True) -> Page:
        page = new_page(dark, scripts)
        page.set_content(html)
        return page

    return page_of


@dataclass(frozen=True)
class Lab:
    """A JupyterLab that is running: its address, the folder it shows, and its settings."""

    url: str
    root: Path
    home: Path

    def setting(self, plugin: str, **values: Any) -> None:
        """Set a user setting; it holds for pages opened from now on."""
        file = self.home / "settings" / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))

    def use_theme(self, theme: str) -> None:
        self.setting(
            "apputils-extension/themes", theme={"light": "JupyterLab Light", "dark": "JupyterLab Dark"}[theme]
        )


@pytest.fixture(scope="session")
def lab(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One JupyterLab for all tests; its home is private, so no one's settings, trust or history count."""
    from fusekit.notebook.demo import cache_folder

    home = tmp_path_factory.mktemp("home")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lab = Lab(f"http://127.0.0.1:{port}", home / "notebooks", home)
    lab.root.mkdir()
    lab.use_theme("light")
    lab.setting(
        "apputils-extension/notification", fetchNews="false", checkForUpdates=False, doNotDisturbMode=True
    )
    # "none": a cell that is scrolled out of sight would not be in the page
    lab.setting("notebook-extension/tracker", autoStartDefaultKernel=True, windowingMode="none")

    kept_out = ("JUPYTER", "IPYTHON", "XDG_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(kept_out)}
    env |= {
        "HOME": str(home),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "FUSEKIT_CACHE": str(cache_folder()),
    }
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
        *("--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token="),
        "--ServerApp.disable_check_xsrf=True",  # lets us end kernels; only this machine reaches the server
        f"--ServerApp.root_dir={lab.root}",
    ]
    log = home / "lab.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out)
    try:
        _wait_until_served(lab.url, process, log)
        yield lab
    finally:
        process.terminate()  # the server ends its kernels
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_until_served(url: str, process: subprocess.Popen, log: Path) -> None:
    for _ in range(480):
        try:
            urllib.request.urlopen(f"{url}/api/status", timeout=1).close()
            return
        except OSError:
            if process.poll() is not None:
                break
            time.sleep(0.25)
    pytest.fail(f"JupyterLab does not answer:\n{log.read_text()}")


# Every cell with code bears a number, or one has failed and those after it were given up.
RAN = """() => {
    const prompts = [...document.querySelectorAll('.jp-Notebook .jp-CodeCell')]
        .filter(cell => cell.querySelector('.cm-content').textContent.trim())
        .map(cell => cell.querySelector('.jp-InputArea-prompt').textContent);
    // an exception is shown as what went to stderr is
    const failed = [...document.querySelectorAll('.jp-Notebook [data-mime-type$=".stderr"]')]
        .some(output => /Error|Exception|Interrupt/.test(output.textContent));
    return prompts.every(prompt => /\\d/.test(prompt)) || (failed && !prompts.some(p => p.includes('*')));
}"""


@pytest.fixture
def open_notebook(lab: Lab, new_page: Open) -> Iterator[Open]:
    """A function that opens a notebook in JupyterLab and, unless told otherwise, runs it to its end."""
    names: list[str] = []

    def open_notebook(
        content: list[str] | nbformat.NotebookNode | Path,
        *,
        theme: str = "light",
        run: bool = True,
        trusted: bool = False,
        timeout: int = 2 * PATIENCE,
    ) -> Page:
        """`content` is code cells, a notebook or the path of one. `trusted` has the outputs that it brings
        shown with their styles and scripts. `timeout` is for running all cells, in ms."""
        notebook = _notebook(content)
        # Trust goes by content: what one test signed must not be trusted in another.
        notebook.metadata["opened_trusted"] = trusted
        stem = content.stem if isinstance(content, Path) else "notebook"
        name = f"{stem}-{len(names)}-{time.monotonic_ns() % 1000}.ipynb" if names else f"{stem}.ipynb"
        names.append(name)
        nbformat.write(notebook, lab.root / name)
        if trusted:
            _trust(lab, name)
        lab.use_theme(theme)
        page = new_page(dark=theme == "dark")
        page.goto(f"{lab.url}/lab/tree/{name}?reset", wait_until="domcontentloaded")
        page.locator(".jp-Notebook .jp-Cell").first.wait_for()
        # The status bar knows of the kernel. The toolbar says idle before there is one, and Run then asks
        # for a kernel in a dialog that nobody answers.
        page.locator("#jp-main-statusbar").get_by_text("| Idle").wait_for()
        if run:
            page.get_by_text("Run", exact=True).first.click()
            page.get_by_text("Run All Cells", exact=True).click()
            page.wait_for_function(RAN, timeout=timeout)
        return page

    yield open_notebook
    _end_kernels(lab, names)


def _notebook(content: list[str] | nbformat.NotebookNode | Path) -> nbformat.NotebookNode:
    if isinstance(content, Path):
        return nbformat.read(content, as_version=4)
    if isinstance(content, list):
        content = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in content])
    # without a kernel's name JupyterLab asks for one
    content.metadata.setdefault(
        "kernelspec", {"name": "python3", "display_name": "Python 3", "language": "python"}
    )
    return content


def _trust(lab: Lab, name: str) -> None:
    subprocess.run(
        [
            sys.executable,
            "-c",
            "from nbformat.sign import TrustNotebookApp as A; A.launch_instance()",
            lab.root / name,
        ],
        env=dict(os.environ, HOME=str(lab.home)),
        check=True,
        capture_output=True,
    )


def _end_kernels(lab: Lab, names: list[str]) -> None:
    """A kernel with a model in it would stay in memory until the server ends."""
    with urllib.request.urlopen(f"{lab.url}/api/sessions") as answer:
        sessions = json.load(answer)
    for session in sessions:
        if Path(session["path"]).name in names:
            request = urllib.request.Request(f"{lab.url}/api/sessions/{session['id']}", method="DELETE")
            urllib.request.urlopen(request).close()


@pytest.fixture
def shot(request: pytest.FixtureRequest) -> Callable[..., Path]:
    """A function that keeps a picture of a page (or a part of one) in `artifacts`, for people to look at."""

    def shot(what: Any, name: str = "") -> Path:
        ARTIFACTS.mkdir(exist_ok=True)
        path = ARTIFACTS / f"{request.node.name}{'-' * bool(name)}{name}.png"
        what.screenshot(path=path)
        return path

    return shot
