"""How results show themselves: text for a terminal, html for a notebook.

Nothing in fusekit imports this package at import time; a result asks for its picture when a
front end asks it. What is asked here never raises: an object that cannot be drawn, or a drawing
with a fault, shows as its type's name and the error's one line.
"""

import html as _html
from dataclasses import dataclass

from fusekit.display.dispatch import as_html, as_text, load
from fusekit.display.markup import Html, clean, join, pre, table
from fusekit.display.theme import document, wrap

__all__ = ["Picture", "as_html", "as_text", "bundle", "html", "page", "render", "text"]


@dataclass(frozen=True)
class Picture:
    """One result, twice: `text` means something by itself, `html` needs no script."""

    text: str
    html: str


def render(obj: object) -> Picture:
    """Both pictures of `obj`."""
    return Picture(text(obj), html(obj))


def text(obj: object) -> str:
    """What `obj` looks like in a terminal; draws no html, so it is cheap."""
    try:
        load(type(obj))
        return clean(as_text(obj))
    except Exception as error:
        return _apology(obj, error)


def html(obj: object) -> str:
    """What `obj` looks like in a notebook: a `<style>` and one `<div>`, the same bytes each time."""
    try:
        load(type(obj))
        return wrap(as_html(obj))
    except Exception as error:
        rows: list[list[object]] = [[pre(text(obj))], [_apology(obj, error)]]
        try:
            return wrap(table("", [], rows))
        except Exception:  # the theme itself is at fault: no style, but still an answer
            return f"<table><tr><td>{_html.escape(_apology(obj, error))}</td></tr></table>"


def bundle(obj: object) -> dict[str, str]:
    """The mimebundle of `obj`: `text/plain` and `text/html`."""
    return {"text/plain": text(obj), "text/html": html(obj)}


def page(obj: object, title: str = "") -> str:
    """A whole html file that shows `obj`, light or dark as the reader's system asks."""
    return document(Html(html(obj)), title or type(obj).__name__)


def _apology(obj: object, error: Exception) -> str:
    try:
        said = join(str(error).splitlines()[:1])
    except Exception:  # an exception whose own message fails
        said = ""
    return clean(f"<{type(obj).__name__}: could not be drawn ({type(error).__name__}: {said})>")
