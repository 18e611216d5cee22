"""What the analysis knows of a value: where its storage may lie, and what kind of thing it is."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fusekit.forward.effects.rules import on


@dataclass(frozen=True)
class Region:
    """A piece of storage, or an object, by where it came from.

    `new` ones are made in the forward, by the expression that `key` names. All others were there before:
    what the caller `given`, tensors and objects of the module and of globals (`own`, by identity), and
    all else that `outside` stands for. `deep`: others can be reached through it.
    """

    kind: Literal["new", "given", "own", "outside"]
    key: Hashable
    label: str = field(default="", compare=False)
    deep: bool = field(default=False, compare=False)
    can_be_input: bool = field(default=True, compare=False)  # whether a caller could pass it to a linear


OUTSIDE = Region("outside", None, "what lies outside of the forward", deep=True)
NOWHERE: frozenset[Region] = frozenset()

PLAIN = "plain"  # a number, a string, None, a size: nothing to write, and nothing runs
TENSOR = "tensor"  # or a tuple or list of tensors that an operator returned
CONTAINER = "container"  # a list, tuple, dict, set or iterator
FUNCTION = "function"  # a nested function or lambda
KNOWN = "known"  # an object that is there now: see `objects`
CONTEXT = "context"  # a context manager of PyTorch's that changes the grad mode and the like
ANY = "any"


class _Unset:
    def __repr__(self) -> str:
        return "unset"


UNSET = _Unset()
MOST_OBJECTS = 8


@dataclass(frozen=True)
class Value:
    """What an expression may be. `token` is equal for two names only if they hold one and the same value."""

    regions: frozenset[Region] = NOWHERE
    kinds: frozenset[str] = frozenset({ANY})
    constant: Any = UNSET  # of a plain value
    fixed: bool = False  # the constant stands in the text, or belongs to a submodule
    objects: tuple[Any, ...] = ()  # what a known value may be
    settings: frozenset[tuple[int, str]] = frozenset()  # (id of a submodule, attribute) of a constant
    token: Hashable = None

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Value)
            and self.regions == other.regions
            and self.kinds == other.kinds
            and self.token == other.token
            and self.fixed == other.fixed
            and self.settings == other.settings
            and _same_constant(self.constant, other.constant)
            and len(self.objects) == len(other.objects)
            and all(a is b for a, b in zip(self.objects, other.objects, strict=True))
        )

    __hash__ = None  # type: ignore[assignment]

    def without_token(self) -> "Value":
        return replace(self, token=None) if self.token is not None else self

    @property
    def is_plain(self) -> bool:
        return self.kinds == {PLAIN}

    @property
    def is_tensor(self) -> bool:
        return TENSOR in self.kinds and self.kinds <= {TENSOR, PLAIN}


def _same_constant(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and type(one) in (int, float, bool, str, bytes) and one == other


PLAIN_VALUE = Value(NOWHERE, frozenset({PLAIN}))
BOTTOM = Value(NOWHERE, frozenset())  # of what cannot be evaluated


def plain(constant: Any = UNSET, fixed: bool = False) -> Value:
    return Value(NOWHERE, frozenset({PLAIN}), constant, fixed and constant is not UNSET)


def tensor(regions: Iterable[Region]) -> Value:
    return Value(frozenset(regions), frozenset({TENSOR}))


def container(regions: Iterable[Region]) -> Value:
    return Value(frozenset(regions), frozenset({CONTAINER}))


def anything(regions: Iterable[Region]) -> Value:
    return Value(frozenset(regions), frozenset({ANY}))


def join(one: Value, other: Value) -> Value:
    """A value that may be either."""
    if one is other or one == other:
        return one
    token = one.token if one.token == other.token else None
    if not one.kinds:
        return replace(other, token=token)
    if not other.kinds:
        return replace(one, token=token)
    kinds, regions = one.kinds | other.kinds, one.regions | other.regions
    objects = one.objects
    for found in other.objects:
        if not any(found is known for known in objects):
            objects = (*objects, found)
    if len(objects) > MOST_OBJECTS:
        objects, kinds, regions = (), (kinds - {KNOWN}) | {ANY}, regions | {OUTSIDE}
    same = _same_constant(one.constant, other.constant) and one.fixed == other.fixed
    constant = one.constant if same else UNSET
    settings = one.settings | other.settings if same else frozenset()
    return Value(regions, kinds, constant, one.fixed and same, objects, settings, token)


def joined(values: Iterable[Value]) -> Value:
    found = BOTTOM
    for value in values:
        found = join(found, value.without_token())
    return found


Fields = dict[Hashable, Value]
REST = "<any item>"  # the key of what may lie anywhere in a container or object
Name = tuple[int, str]  # the number of a frame, and a name in it


@dataclass
class State:
    """What names hold and what lies in containers and objects at one point of the forward."""

    names: dict[Name, Value] = field(default_factory=dict)
    heap: dict[Region, Fields] = field(default_factory=dict)
    escaped: frozenset[Region] = NOWHERE  # made here, and stored where other code may find it

    def copy(self) -> "State":
        return State(dict(self.names), dict(self.heap), self.escaped)

    def put(self, region: Region, key: Hashable, value: Value, surely: bool = False) -> None:
        """Store a value in a container or object; what lay there before may still, unless `surely`."""
        fields = dict(self.heap.get(region, {}))
        old = fields.get(key)
        value = value.without_token()
        fields[key] = value if old is None or surely else join(old, value)
        self.heap[region] = fields

    def retoken(self, token: Hashable, keep: frozenset[Name] = frozenset()) -> None:
        """A new value gets `token`: whoever has held it holds one of an earlier round of a loop."""
        for name, value in self.names.items():
            if value.token == token and name not in keep:
                self.names[name] = replace(value, token=("stale", token, name))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, State)
            and self.names == other.names
            and self.heap == other.heap
            and self.escaped == other.escaped
        )


def meet(one: State | None, other: State | None, place: Hashable) -> State | None:
    """The state where two ways come together at `place`."""
    if one is None or other is None or one is other:
        return one if other is None else other
    found = State({}, {}, one.escaped | other.escaped)
    differing: dict[tuple[Hashable, Hashable], list[Name]] = {}
    for name in {**one.names, **other.names}:
        a, b = one.names.get(name), other.names.get(name)
        found.names[name] = join(a or BOTTOM, b or BOTTOM)
        tokens = (a.token if a else None, b.token if b else None)
        if tokens[0] != tokens[1]:
            differing.setdefault(tokens, []).append(name)
    for names in differing.values() if on("values") else ():
        token = ("met", place, tuple(sorted(names)))
        found.retoken(token)
        for name in names:
            found.names[name] = replace(found.names[name], token=token)
    if not on("values"):
        for (first, _), names in differing.items():
            for name in names:
                found.names[name] = replace(found.names[name], token=first)
    for region in {**one.heap, **other.heap}:
        mine, theirs = one.heap.get(region, {}), other.heap.get(region, {})
        fields: Fields = {}
        for key in {**mine, **theirs}:
            left, right = mine.get(key), theirs.get(key)
            if left is None or right is None:
                value = left or right
                assert value is not None
                # Of an object that was there before, what it held before may still be there.
                fields[key] = value if region.kind == "new" else join(value, anything({OUTSIDE}))
            else:
                fields[key] = join(left, right)
        found.heap[region] = fields
    return found
