"""One theme for everything: colours, and what a trusted page adds to the inline styles.

Text has no colour of its own inline: an untrusted notebook keeps nothing else, and no ink reads
well on white and on near-black at once. Weight tells words apart there. Colours come with
the `<style>`, one for light and one for dark paper, and only where the paper is known: JupyterLab
says so on `body` (a media query does not know, it stays light in JupyterLab Dark), VS Code does
too, and a page of our own follows the reader's `prefers-color-scheme` in ink and paper alike.
Asking that query anywhere else would write pale ink on the white paper of a page that does not
follow it.
"""

from collections.abc import Sequence

from fusekit.display.markup import Html, esc, many, tag

COLOURS = {  # name: (on light, on dark)
    "keyword": ("#7b30b8", "#c792ea"),
    "string": ("#1a6b35", "#8fd19e"),
    "comment": ("#636b76", "#9aa4b1"),
    "number": ("#0b5cad", "#82b7f5"),
    "name": ("#a0431c", "#f0a781"),  # of a def or a decorator
    "good": ("#1a6b35", "#8fd19e"),
    "bad": ("#b3261e", "#ff9d94"),
}
TINTS = {  # of lines and words in a diff, of boxes in a drawing; thin enough for either ground
    "added": "rgba(46,160,67,0.16)",
    "removed": "rgba(248,81,73,0.16)",
    "added-word": "rgba(46,160,67,0.36)",
    "removed-word": "rgba(248,81,73,0.36)",
    "marked": "rgba(200,150,0,0.20)",
    "quiet": "rgba(128,128,128,0.10)",
    "bar-unfused": "rgba(122,130,142,0.75)",
    "bar-fused": "rgba(47,127,208,0.85)",
}
PLAIN = {"keyword": "font-weight:600", "comment": "opacity:0.8"}  # where there is no colour


def ink(name: str, text: object) -> Html:
    """`text` in a colour of the theme, where the ground is known."""
    return tag("span", text, PLAIN.get(name, ""), class_=f"fk-{name}")


def verdict(ok: bool, good: str = "ok", bad: str = "failed") -> Html:
    """A word that says it, in bold, and in colour besides."""
    return ink("good", tag("b", good)) if ok else ink("bad", tag("b", bad))


def notice(*parts: object) -> Html:
    """What must not be overlooked: a framed line."""
    style = "margin:4px 0;padding:4px 8px;border-left:3px solid #888888;"
    return tag("div", many(*parts), style + f"background:{TINTS['marked']}")


def wrap(body: Html) -> str:
    """`body` as one output: what is in `.fk-rich` shows only where the `<style>` survives.

    The sanitiser drops `<svg>` but keeps the words in it; hidden inline, they do not leak.
    """
    base = "font-family:system-ui,sans-serif;font-size:13px;line-height:1.45;text-align:left"
    return f"<style>{_style()}</style>" + tag("div", body, base, class_="fusekit")


def document(body: Html, title: str) -> str:
    """A whole page, on light or dark paper as the reader's system has it."""
    head = f'<meta charset="utf-8"><meta name="color-scheme" content="light dark"><title>{esc(title)}</title>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body class="fk-page">{body}</body></html>\n'


LIGHT = ('body[data-jp-theme-light="true"]', "body.vscode-light", "body.vscode-high-contrast-light")
DARK = (
    'body[data-jp-theme-light="false"]',
    "body.vscode-dark",
    "body.vscode-high-contrast:not(.vscode-high-contrast-light)",
)


def _style() -> str:
    light = ";".join(f"--fk-{name}:{c[0]}" for name, c in COLOURS.items())
    dark = ";".join(f"--fk-{name}:{c[1]}" for name, c in COLOURS.items())
    inks = "".join(f".fusekit .fk-{name}{{color:var(--fk-{name},inherit)}}" for name in COLOURS)
    mono = "var(--jp-code-font-family,var(--vscode-editor-font-family,ui-monospace,monospace))"
    return (
        f"{_on(LIGHT)}{{{light}}}{_on(DARK)}{{{dark}}}{_on(['body.fk-page'])}{{{light}}}"
        f"@media (prefers-color-scheme:dark){{{_on(['body.fk-page'])}{{{dark}}}}}"
        f"{inks}"
        f".fusekit pre,.fusekit code,.fusekit svg text{{font-family:{mono}}}"
        ".fusekit pre{font-size:12px!important;line-height:1.5!important;tab-size:4;color:inherit}"
        ".fusekit code{color:inherit;font-size:95%}"
        ".fusekit table{font-variant-numeric:tabular-nums}"
        ".fusekit .fk-rich{display:block!important}.fusekit .fk-bare{display:none!important}"
        ".fusekit .fk-numbers{user-select:none}"
        ".fusekit summary:focus-visible{outline:2px solid currentColor}"
    )


def _on(grounds: Sequence[str]) -> str:
    return ",".join(f"{ground} .fusekit" for ground in grounds)
