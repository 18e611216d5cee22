"""Repeated layers as one row: items whose paths differ only in a number are grouped.

`model.layers.0.mlp` to `model.layers.31.mlp` become `model.layers.0-31.mlp`. It is done for one
number after another, from the left, so that the experts of all layers make one row too; a group
always stands for every combination of its numbers, never for more paths than were given.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Generic, TypeVar

Item = TypeVar("Item")
Part = str | tuple[int, ...]  # of a path: a word, or the numbers that stand there


@dataclass(frozen=True)
class Group(Generic[Item]):
    """Items that are the same up to numbers in their paths, in the order given."""

    parts: tuple[Part, ...]
    items: tuple[Item, ...]

    @property
    def first(self) -> Item:
        return self.items[0]

    @property
    def label(self) -> str:
        """The path, with ranges where it has many numbers: "model.layers.0-29.self_attn"."""
        return ".".join(p if isinstance(p, str) else ranges(p) for p in self.parts)

    def paths(self) -> list[str]:
        """Every path the group stands for."""
        words = [[part] if isinstance(part, str) else [str(number) for number in part] for part in self.parts]
        return [".".join(path) for path in product(*words)]


def group(
    items: Iterable[Item], path: Callable[[Item], str], key: Callable[[Item], Hashable]
) -> list[Group[Item]]:
    """Groups of items of equal `key` whose paths differ in numbers only, by first appearance."""
    order = list(items)
    found: dict[tuple[Hashable, tuple[Part, ...]], list[int]] = {}
    for n, item in enumerate(order):
        found.setdefault((key(item), _split(path(item))), []).append(n)
    keyed = [(same, Group(parts, tuple(at))) for (same, parts), at in found.items()]
    for place in range(max((len(one.parts) for _, one in keyed), default=0)):
        keyed = _merge(keyed, place)
    groups = sorted((one for _, one in keyed), key=lambda one: one.items[0])
    return [Group(one.parts, tuple(order[n] for n in one.items)) for one in groups]


def _split(path: str) -> tuple[Part, ...]:
    if not path:
        return ()
    return tuple((int(word),) if _is_number(word) else word for word in path.split("."))


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit() and str(int(word)) == word  # "07" is a name


def _merge(keyed: list[tuple[Hashable, Group[int]]], place: int) -> list[tuple[Hashable, Group[int]]]:
    """Joins groups that differ only in the numbers at `place`."""
    out: dict[Hashable, tuple[Hashable, Group[int]]] = {}
    for key, one in keyed:
        here = one.parts[place] if place < len(one.parts) else ""
        if isinstance(here, str):
            out[key, one.parts] = (key, one)
            continue
        rest = (key, one.parts[:place], None, one.parts[place + 1 :])
        was = out.get(rest)
        if was is None:
            out[rest] = (key, one)
            continue
        numbers = tuple(sorted({*here, *was[1].parts[place]}))  # type: ignore[arg-type]
        parts = (*one.parts[:place], numbers, *one.parts[place + 1 :])
        out[rest] = (key, Group(parts, tuple(sorted((*was[1].items, *one.items)))))
    return list(out.values())


def ranges(numbers: Sequence[int], most: int = 8) -> str:
    """Sorted numbers in short: "0-3,7", "0-30:2" for every second; past `most` pieces "…"."""
    if len(numbers) >= 4:
        step = numbers[1] - numbers[0]
        if step > 1 and all(b - a == step for a, b in pairwise(numbers)):
            return f"{numbers[0]}-{numbers[-1]}:{step}"
    pieces: list[str] = []
    start = 0
    for n in range(1, len(numbers) + 1):
        if n == len(numbers) or numbers[n] != numbers[n - 1] + 1:
            first, last = numbers[start], numbers[n - 1]
            pieces.append(str(first) if first == last else f"{first}-{last}")
            start = n
    return ",".join(pieces if len(pieces) <= most else [*pieces[: most - 1], "…", pieces[-1]])
