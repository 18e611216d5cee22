"""What became of the sites and refusals of one plan in another: after an upgrade, say."""

import os
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fusekit.errors import FusekitError
from fusekit.model.plan import Plan
from fusekit.model.saved import SavedPlan, SavedRefusal, SavedSite, load_plan, saved
from fusekit.shown import Shown

if TYPE_CHECKING:
    import pandas

MERGES = frozenset({"qkv", "kv", "mla", "columns"})  # roles of one rewrite
Place = SavedSite | SavedRefusal
Item = TypeVar("Item", SavedSite, SavedRefusal)


@dataclass(frozen=True, repr=False)
class Change(Shown):
    """One difference between two plans: what was at a place `before`, and what is there `after`.

    Either is a site, a refusal, or None where nothing looked fusable. `kind` is `disappeared`,
    `appeared`, `changed`, `new refusal` or `gone refusal`.
    """

    kind: str
    before: Place | None
    after: Place | None

    @property
    def place(self) -> Place:
        """What it is about: what was there, or what is there where that is the news."""
        found = self.after if self.before is None or self.kind == "appeared" else self.before
        assert found is not None
        return found

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def fusion(self) -> str:
        return self.place.fusion

    @property
    def parts(self) -> tuple[str, ...]:
        return self.place.parts

    @property
    def message(self) -> str:
        """What happened, in words, without the module's name."""
        before, after = self.before, self.after
        if self.kind == "disappeared":
            if after is None:
                return "no site and no refusal is there any more"
            return f"now {_called(after, before)}"
        if self.kind == "appeared":
            return f"was {_called(before, after, False)}" if before else "new"
        if before is None:
            return _called(self.place, self.place)
        if after is None:
            return f"was {_called(before, before, False)}"
        return f"{_called(before, after, False)} → {_called(after, before)}"


def _called(place: Place, other: Place | None = None, in_full: bool = True) -> str:
    """A site or refusal in words, without the parts where they are those of the `other` end."""
    refused = isinstance(place, SavedRefusal)
    same_parts = other is not None and place.parts == other.parts
    parts = "" if same_parts or not place.parts else f" of {', '.join(place.parts)}"
    if other is not None and refused and same_parts and place.fusion == other.fusion:
        called = "refused"
    else:
        called = f"{place.fusion}{parts}" + (" refused" if refused else "")
    if not isinstance(place, SavedRefusal):
        return called
    why = place.message.removeprefix(f"{place.name}: ").removeprefix(f"cannot fuse {place.fusion}: ")
    return f"{called} [{place.reason}]" + (f": {why}" if in_full else "")


@dataclass(frozen=True, repr=False, eq=False)
class PlanChanges(Shown):
    """How `after` differs from `before`.

    `disappeared` are sites that are no longer there, each with the refusal that they turned into
    where there is one; `appeared` are new sites, each with the refusal that they were. `changed` are
    sites whose linears are still merged, under another role or with more of them, and refusals with
    another reason. `new_refusals` and `gone_refusals` are refusals that no site turned into or came
    from. An applied site counts as a site. A line of source that moved is no change, nor is a message
    with other words.

    It is true where anything changed; `.ok` says that no site disappeared.
    """

    before: SavedPlan
    after: SavedPlan
    appeared: tuple[Change, ...]
    disappeared: tuple[Change, ...]
    changed: tuple[Change, ...]
    new_refusals: tuple[Change, ...]
    gone_refusals: tuple[Change, ...]

    @property
    def ok(self) -> bool:
        """Whether every site is still there."""
        return not self.disappeared

    @property
    def all(self) -> tuple[Change, ...]:
        """Every change, what is lost first."""
        return (
            *self.disappeared,
            *self.changed,
            *self.appeared,
            *self.new_refusals,
            *self.gone_refusals,
        )

    def __bool__(self) -> bool:
        return bool(self.all)

    def to_frame(self) -> "pandas.DataFrame":
        """One row a change: kind, name, type, fusion, parts, before, after, message, path, line.

        `before` and `after` are `site`, `applied`, a refusal's reason, or empty; `path` and `line`
        those of what is there now, else of what was.
        """
        import pandas as pd

        rows = []
        for change in self.all:
            place, at = change.place, change.after or change.before
            assert at is not None
            rows.append(
                {
                    "kind": change.kind,
                    "name": place.name,
                    "type": place.type_name,
                    "fusion": place.fusion,
                    "parts": ", ".join(place.parts),
                    "before": state(change.before),
                    "after": state(change.after),
                    "message": change.message,
                    "path": at.path or "",
                    "line": at.line or 0,
                }
            )
        columns = ["kind", "name", "type", "fusion", "parts", "before", "after", "message", "path", "line"]
        return pd.DataFrame(rows, columns=columns)


def state(place: Place | None) -> str:
    """`site`, `applied`, the reason of a refusal, or nothing."""
    if place is None:
        return ""
    if isinstance(place, SavedRefusal):
        return place.reason
    return "applied" if place.applied else "site"


def compare(a: Plan | SavedPlan | str | Path, b: Plan | SavedPlan | str | Path) -> PlanChanges:
    """How the plan `b` differs from `a`: plans, saved plans, or paths of saved plans.

    A place is known by its module's name, its fusion and its parts. Raises `FusekitError` for
    anything else than a plan, and as `load_plan` does.
    """
    before, after = _saved(a), _saved(b)
    old, new = _unmatched((*before.sites, *before.applied), (*after.sites, *after.applied))
    refused_before, refused_now = _unmatched(before.refusals, after.refusals)
    sites_now, were, are = _by_name(new), _by_name(refused_before), _by_name(refused_now)
    still = _by_name(after.refusals)
    used: set[int] = set()  # what is told already, as the other end of a change
    changed: list[Change] = []
    disappeared: list[Change] = []
    appeared: list[Change] = []

    def tell(kind: str, site: SavedSite, other: Place | None) -> Change:
        used.add(id(other))
        return Change(kind, other, site) if kind == "appeared" else Change(kind, site, other)

    for site in old:
        here = sites_now.get(site.name, [])
        heir = next((other for other in here if _continues(site, other)), None)
        if heir:
            changed.append(tell("changed", site, heir))
            continue
        turned = _nearest(site, are.get(site.name, [])) or _nearest(site, still.get(site.name, []))
        left = [other for other in here if set(other.parts) & set(site.parts)]
        disappeared.append(
            tell("disappeared", site, turned) if turned or not left else Change("disappeared", site, left[0])
        )
    for site in new:
        if id(site) not in used:
            appeared.append(tell("appeared", site, _nearest(site, were.get(site.name, []))))
    rest = [refusal for refusal in refused_now if id(refusal) not in used]
    gone: list[Change] = []
    for refusal in refused_before:
        if id(refusal) in used:
            continue
        same = [other for other in rest if _is_same(refusal, other)]
        if same:
            best = min(same, key=lambda other: other.fusion != refusal.fusion)
            rest = [other for other in rest if other is not best]
            changed.append(Change("changed", refusal, best))
        else:
            gone.append(Change("gone refusal", refusal, None))
    come = tuple(Change("new refusal", None, refusal) for refusal in rest)
    return PlanChanges(before, after, tuple(appeared), tuple(disappeared), tuple(changed), come, tuple(gone))


def _unmatched(old: Iterable[Item], new: Iterable[Item]) -> tuple[list[Item], list[Item]]:
    """Those of either side that the other side has no equal for, in their order."""
    left: dict[Hashable, list[Item]] = {}
    for item in new:
        left.setdefault(_key(item), []).append(item)
    gone = []
    for item in old:
        same = left.get(_key(item))
        if same:
            same.pop(0)
        else:
            gone.append(item)
    remaining = {id(item) for items in left.values() for item in items}
    return gone, [item for item in new if id(item) in remaining]


def _key(item: Place) -> Hashable:
    reason = item.reason if isinstance(item, SavedRefusal) else ""
    return item.name, item.fusion, item.parts, reason


def _by_name(items: Iterable[Item]) -> dict[str, list[Item]]:
    found: dict[str, list[Item]] = {}
    for item in items:
        found.setdefault(item.name, []).append(item)
    return found


def _continues(old: SavedSite, new: SavedSite) -> bool:
    """Whether what `old` merges is merged by `new` too: nothing is lost."""
    if not old.parts or not set(old.parts) <= set(new.parts):
        return False
    return old.fusion == new.fusion or old.fusion in MERGES


def _is_same(old: SavedRefusal, new: SavedRefusal) -> bool:
    """Whether two refusals are about one thing: the same fusion of the same parts, or a role of it."""
    if (old.name, old.parts) != (new.name, new.parts):
        return False
    return old.fusion == new.fusion or (bool(old.parts) and {old.fusion, new.fusion} <= MERGES)


def _nearest(site: SavedSite, refusals: Sequence[SavedRefusal]) -> SavedRefusal | None:
    """The refusal of the same module that speaks of `site`, best first: of its parts, then of its fusion."""

    def far(refusal: SavedRefusal) -> int:
        common = set(site.parts) & set(refusal.parts)
        if refusal.fusion == site.fusion and (common or not site.parts or not refusal.parts):
            return 0
        if common:
            return 1
        return 2 if not refusal.parts and bool(site.parts) else 3

    near = [refusal for refusal in refusals if far(refusal) < 3]
    return min(near, key=far, default=None)


def _saved(plan: Plan | SavedPlan | str | Path) -> SavedPlan:
    if isinstance(plan, SavedPlan):
        return plan
    if isinstance(plan, Plan):
        return saved(plan)
    if isinstance(plan, str | os.PathLike):
        return load_plan(plan)
    raise FusekitError(
        f"compare() takes plans, saved plans or paths of saved plans, not {type(plan).__name__}: "
        "make a plan with fk.plan(model)"
    )
