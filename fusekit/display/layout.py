"""DOT source -> positions: runs `dot` or graphviz-pure, and gives the drawing as plain shapes.

The program is run here, with a time limit, and not through `graphviz`, which has none and would
have to be told by a global variable which program to use. Its svg is read and written anew: only
shapes and words are kept, so that no id, link, `<title>` or namespace ends up in a notebook.
"""

import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from xml.etree import ElementTree

SECONDS = 5.0


@dataclass(frozen=True)
class Shape:
    """One outline of a box: `name` is an svg element, `attributes` its geometry."""

    name: str
    attributes: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Word:
    x: str
    y: str
    text: str


@dataclass(frozen=True)
class Item:
    """A box or an arrow. `title` is its name in the DOT source."""

    kind: str  # "node" or "edge"
    title: str
    shapes: tuple[Shape, ...]
    words: tuple[Word, ...]


@dataclass(frozen=True)
class Layout:
    view_box: str
    transform: str
    items: tuple[Item, ...]

    @property
    def width(self) -> float:
        return float(self.view_box.split()[2])

    @property
    def height(self) -> float:
        return float(self.view_box.split()[3])


class NoLayout(Exception):
    """Nothing was laid out; the message is a sentence for the reader."""


def program() -> str | None:
    """The layout program: `dot` on the path, else what graphviz-pure installed."""
    found = shutil.which("dot") or shutil.which("graphviz-pure")
    if found:
        return found
    own = Path(sysconfig.get_path("scripts")) / "graphviz-pure"
    for path in (own, own.with_suffix(".exe")):
        if path.is_file():
            return str(path)
    return None


@lru_cache(maxsize=64)
def lay_out(dot_source: str, exe: str | None = None, seconds: float = SECONDS) -> Layout:
    """Positions of everything in `dot_source`. Raises `NoLayout` with the reason."""
    exe = exe or program()
    if exe is None:
        raise NoLayout("No drawing: neither dot nor graphviz-pure is there (pip install graphviz-pure).")
    try:
        done = subprocess.run(
            [exe, "-Tsvg"], input=dot_source.encode(), capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise NoLayout(f"No drawing: its layout took more than {seconds:g} seconds.") from None
    except OSError as error:
        raise NoLayout(f"No drawing: {Path(exe).name} could not be run ({error.strerror}).") from None
    try:
        return _read(ElementTree.fromstring(done.stdout.decode()))
    except (ElementTree.ParseError, UnicodeDecodeError, StopIteration, KeyError):
        raise NoLayout(f"No drawing: {Path(exe).name} gave none (exit code {done.returncode}).") from None


_GEOMETRY = ("d", "points", "cx", "cy", "rx", "ry", "x", "y", "width", "height")


def _read(svg: ElementTree.Element) -> Layout:
    whole = next(child for child in svg if _name(child) == "g")
    items = [_item(group) for group in whole if _name(group) == "g"]
    return Layout(svg.attrib["viewBox"], whole.attrib.get("transform", ""), tuple(items))


def _item(group: ElementTree.Element) -> Item:
    title, shapes, words = "", [], []
    for element in group.iter():
        name = _name(element)
        if name == "title":
            title = element.text or ""
        elif name == "text":
            words.append(Word(_short(element.attrib["x"]), _short(element.attrib["y"]), element.text or ""))
        elif name in ("path", "polygon", "polyline", "ellipse"):
            geometry = tuple((k, _short(v)) for k, v in element.attrib.items() if k in _GEOMETRY)
            shapes.append(Shape(name, geometry))
    return Item(group.attrib.get("class", "").split(" ")[0], title, tuple(shapes), tuple(words))


def _name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _short(numbers: str) -> str:
    """Coordinates to a tenth of a point: half the bytes, and nothing to see."""
    out, number = [], ""
    for char in numbers + " ":
        if char.isdigit() or (char in ".-" and not (char == "-" and number)):
            number += char
            continue
        if number:
            out.append(f"{float(number):.1f}".removesuffix(".0") if "." in number else number)
        number = "-" if char == "-" else ""
        out.append("" if char == "-" else char)
    return "".join(out).strip()
