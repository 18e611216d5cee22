"""The forward that really runs: numbered and coloured lines, and what is wrapped around them."""

import os

from fusekit.display.code import indent_of, numbered, outdent
from fusekit.display.dispatch import as_html, as_text
from fusekit.display.markup import Html, code, count, fold, line, lines_of, many, soft, tag
from fusekit.forward import ForwardSource
from fusekit.forward.source import cell_name, short_path


def place(path: str | None, number: int | None) -> str:
    """File and line, as in modeling_llama.py:210; empty where there is no path."""
    name = short_path(path) if path else ""
    return name if number is None or not name else f"{name}:{number}"


def shown_path(path: str) -> str:
    """`path` from the packages' folder on: what comes before differs from machine to machine, and is
    nobody's business in a notebook that is passed on. A notebook cell is named as in tracebacks."""
    if cell := cell_name(path):
        return cell
    parts = path.replace(os.sep, "/").split("/")
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            return "/".join(parts[parts.index(folder) + 1 :])
    here = os.path.relpath(path) if os.path.isabs(path) and path.startswith(os.getcwd() + os.sep) else path
    return os.path.basename(path) if any(part.startswith("ipykernel_") for part in parts) else here


def numbered_text(text: str, first: int, indent: str = "  ") -> list[str]:
    lines = lines_of(outdent(text, indent_of(text)))
    width = len(str(first + len(lines)))
    return [f"{indent}{number:>{width}}  {body}".rstrip() for number, body in enumerate(lines, first)]


def folded_source(source: ForwardSource | None, marked: dict[int, str] | None = None) -> Html:
    """The source behind one click, for results that refer to its lines; empty where there is none."""
    if source is None:
        return Html("")
    title = many("source: ", code(source.name), soft(f"  {place(source.path, source.line)}"))
    return fold(title, numbered(source.text, source.line, marked))


def _wrapped(source: ForwardSource) -> str:
    if not source.wrappers:
        return ""
    return f"inside {count(len(source.wrappers), 'wrapper')}, outermost first: {', '.join(source.wrappers)}"


@as_text.register
def _(source: ForwardSource) -> str:
    head = f"{source.name}  {shown_path(source.path)}:{source.line}"
    wrapped = [f"  {_wrapped(source)}"] if source.wrappers else []
    return "\n".join([head, *wrapped, *numbered_text(source.text, source.line)])


@as_html.register
def _(source: ForwardSource) -> Html:
    head = line(tag("b", code(source.name)), "  ", soft(f"{shown_path(source.path)}:{source.line}"))
    wrapped = line(soft(_wrapped(source))) if source.wrappers else ""
    return many(head, wrapped, numbered(source.text, source.line))
