"""The rewrites of many sites as few diffs: one per distinct forward, not one per layer."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fusekit.display import as_html, as_text
from fusekit.display import diff as _draws_each_diff  # noqa: F401
from fusekit.display.markup import Html, many
from fusekit.forward import SourceDiff, edited_text
from fusekit.model import Site
from fusekit.shown import Shown


@dataclass(frozen=True, repr=False)
class Diffs(Shown):
    """Source diffs, shown one after another; a sequence of `SourceDiff`, and `str()` is one patch."""

    diffs: tuple[SourceDiff, ...]

    def __iter__(self) -> Iterator[SourceDiff]:
        return iter(self.diffs)

    def __len__(self) -> int:
        return len(self.diffs)

    def __getitem__(self, index: int) -> SourceDiff:
        return self.diffs[index]

    def __str__(self) -> str:
        return "\n".join(str(diff) for diff in self.diffs)


def diffs_of(sites: Iterable[Site]) -> SourceDiff | Diffs:
    """The forwards of `sites` before and after: all sites of a module in one diff, equal diffs once.

    A single one comes as the `SourceDiff` itself.
    """
    modules: dict[int, list[Site]] = {}
    for site in sites:
        modules.setdefault(id(site.module), []).append(site)
    places: dict[tuple[str, int, str], list[list[Site]]] = {}
    for same in modules.values():
        source = same[0].analysis.source
        assert source is not None
        after = edited_text(source, [edit for site in same for edit in site.match.edits])
        places.setdefault((source.path, source.line, after), []).append(same)
    diffs = tuple(_diff(after, found) for (_, _, after), found in places.items())
    return diffs[0] if len(diffs) == 1 else Diffs(diffs)


def _diff(after: str, places: list[list[Site]]) -> SourceDiff:
    first = places[0][0]
    source = first.analysis.source
    assert source is not None
    fusions = ", ".join(site.fusion for site in places[0])
    where = first.name or first.type_name
    if len(places) > 1:
        where = f"{first.type_name} in {len(places)} places"
    return SourceDiff(source.text, after, source.path, source.line, f"{where}: {fusions}")


@as_text.register
def _(diffs: Diffs) -> str:
    return "\n\n".join(as_text(diff) for diff in diffs)


@as_html.register
def _(diffs: Diffs) -> Html:
    return many(*(as_html(diff) for diff in diffs))
