import nbformat
import pytest

SLIDER = """import ipywidgets as w
slider, button, out, seen = w.IntSlider(value=3, max=10), w.Button(description="Apply"), w.HTML("-"), w.HTML()
slider.observe(lambda change: setattr(seen, "value", f"<i class=seen>{change.new}</i>"), "value")
button.on_click(lambda _: setattr(out, "value", f"<b class=probe>clicked at {slider.value}</b>"))
w.VBox([slider, button, out, seen])"""


def test_notebook_runs_and_its_widgets_answer(open_notebook, shot):
    page = open_notebook(["print(6 * 7)", SLIDER])
    assert page.locator(".jp-OutputArea-output pre").first.inner_text().strip() == "42"
    handle = page.locator(".jp-OutputArea .noUi-handle")
    handle.focus()  # keys move it reliably, dragging does not
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    # A busy kernel hears of the last key later than the page shows it.
    page.wait_for_function("document.querySelector('i.seen')?.textContent === '7'")
    page.get_by_role("button", name="Apply").click()
    assert page.locator("b.probe").inner_text() == "clicked at 7"
    shot(page)
    assert page.errors == []
    assert page.offsite == []


def test_a_failing_cell_ends_the_run(open_notebook):
    page = open_notebook(["1 / 0", "print('never')"])
    assert "ZeroDivisionError" in page.locator(".jp-OutputArea-output").first.inner_text()
    assert page.get_by_text("never", exact=True).count() == 0


@pytest.mark.parametrize(("theme", "is_light"), [("dark", "false"), ("light", "true")])
def test_theme_is_as_asked(open_notebook, theme, is_light):
    page = open_notebook([""], theme=theme, run=False)
    page.locator(f'body[data-jp-theme-light="{is_light}"]').wait_for(state="attached")


@pytest.mark.parametrize("trusted", [False, True])
def test_only_a_trusted_notebook_keeps_its_styles(open_notebook, trusted):
    data = {
        "text/html": "<style>.probe { color: rgb(1, 2, 3) }</style><p class=probe>hello</p>",
        "text/plain": "x",
    }
    cell = nbformat.v4.new_code_cell("x", outputs=[nbformat.v4.new_output("display_data", data)])
    page = open_notebook(nbformat.v4.new_notebook(cells=[cell]), run=False, trusted=trusted)
    colour = page.locator("p:has-text('hello')").evaluate("p => getComputedStyle(p).color")
    assert (colour == "rgb(1, 2, 3)") == trusted


@pytest.mark.parametrize("dark", [False, True])
def test_page_of_follows_the_colour_scheme(page_of, dark):
    page = page_of(
        "<style>@media (prefers-color-scheme: dark) { p { color: red } }</style><p>hello</p>", dark=dark
    )
    colour = page.locator("p").evaluate("p => getComputedStyle(p).color")
    assert colour == ("rgb(255, 0, 0)" if dark else "rgb(0, 0, 0)")


def test_page_watches_for_requests_and_errors(page_of):
    page = page_of("<img src='http://nowhere.invalid/x.png'><script>throw Error('loud')</script>")
    page.wait_for_timeout(100)
    assert page.offsite == ["http://nowhere.invalid/x.png"]
    assert page.errors == ["loud"]
    page.offsite.clear(), page.errors.clear()


def test_page_without_scripts_runs_none(page_of):
    page = page_of(
        "<p>before</p><script>document.querySelector('p').textContent = 'after'</script>", scripts=False
    )
    assert page.locator("p").inner_text() == "before"
