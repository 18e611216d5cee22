"""Lists, tuples and dicts that hold the input, and those that do not."""

import itertools

import torch

from tests.adversarial.cases import Cases, Pair, one, same, two

cases = Cases()
WRITTEN = ("input-written", "input-may-be-written")


# -- lists ---------------------------------------------------------------------------------------


@cases.refuses(*WRITTEN)
class Appended(Pair):
    def forward(self, x):
        box = []
        box.append(x)
        q = self.q(x)
        box[-1].mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class Popped(Pair):
    def forward(self, x):
        box = [x]
        q = self.q(x)
        box.pop().mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class Extended(Pair):
    def forward(self, x):
        box = []
        box.extend((1, x))
        q = self.q(x)
        box[1].mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class Inserted(Pair):
    def forward(self, x):
        box = [1]
        box.insert(0, x)
        q = self.q(x)
        h = box[0]
        h.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class AppendedBetween(Pair):
    def forward(self, x):
        box = [x + 1]
        q = self.q(x)
        box.append(x)
        for t in box:
            t.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class AddedToAList(Pair):
    def forward(self, x):
        box = [1]
        box += [x]
        q = self.q(x)
        box[1].mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class SumOfLists(Pair):
    def forward(self, x):
        box = [1] + [x] * 2
        q = self.q(x)
        box[2].mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class SliceOfAList(Pair):
    def forward(self, x):
        box = [1, x, 2]
        q = self.q(x)
        for t in box[1:2]:
            t.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class StoredIntoASlice(Pair):
    def forward(self, x):
        box = [1]
        box[:] = [x]
        q = self.q(x)
        box[0].mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class TwoNamesOfAList(Pair):
    def forward(self, x):
        one = other = []
        one.append(x)
        q = self.q(x)
        other[0].mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class ListOfViews(Pair):
    def forward(self, x):
        views = [x[..., :4], x[..., 4:]]
        q = self.q(x)
        views[1].mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class ListByComprehension(Pair):
    def forward(self, x):
        views = [x[..., i] for i in range(8)]
        q = self.q(x)
        views[1].mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class WritesInAComprehension(Pair):
    def forward(self, x):
        q = self.q(x)
        sums = [t.mul_(2).sum() for t in [x]]
        return q, self.k(x), sums


@cases.refuses(*WRITTEN, inputs=(two, same))
class EachOfAList(Pair):
    def forward(self, x, y):
        q = self.q(x)
        for t in [x, y]:
            t.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class EachOfAZip(Pair):
    def forward(self, x):
        q = self.q(x)
        for t, by in zip([x], [2], strict=True):
            t.mul_(by)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class EachOfAnEnumeration(Pair):
    def forward(self, x):
        q = self.q(x)
        for n, t in enumerate([x]):
            t.add_(n + 1)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class EachOfAChain(Pair):
    def forward(self, x):
        q = self.q(x)
        for t in itertools.chain([x], []):
            t.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class EachReversed(Pair):
    def forward(self, x):
        q = self.q(x)
        for t in reversed((x,)):
            t.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class RowsOfTheInput(Pair):
    def forward(self, x):
        q = self.q(x)
        for row in x:
            row.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class NextOfAnIterator(Pair):
    def forward(self, x):
        items = iter([x])
        q = self.q(x)
        next(items).mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class MapOfALambda(Pair):
    def forward(self, x):
        doubled = map(lambda t: t.mul_(2), [x])
        q = self.q(x)
        list(doubled)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class OfASet(Pair):
    def forward(self, x):
        items = {x}
        q = self.q(x)
        for t in items:
            t.mul_(2)
        return q, self.k(x)


# -- tuples and arguments ------------------------------------------------------------------------------


@cases.refuses(*WRITTEN)
class OfATuple(Pair):
    def forward(self, x):
        pair = (1, x)
        q = self.q(x)
        pair[1].mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class UnpackedLater(Pair):
    def forward(self, x):
        pair = x, x + 1
        q = self.q(x)
        a, b = pair
        a.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class StarredArguments(Pair):
    def forward(self, x):
        args = (x, 0.5)
        q = self.q(x)
        torch.Tensor.mul_(*args)
        return q, self.k(x)


@cases.refuses(*WRITTEN, backward=False)
class StarredKeywords(Pair):
    def forward(self, x):
        options = {"out": x}
        q = self.q(x)
        torch.mul(x, 2, **options)
        return q, self.k(x)


@cases.refuses(*WRITTEN, inputs=(same, one))
class RestOfTheArguments(Pair):
    def forward(self, x, *rest):
        q = self.q(x)
        for t in rest:
            t.mul_(2)
        return q, self.k(x)


# -- dicts -------------------------------------------------------------------------------------------


@cases.refuses(*WRITTEN)
class OfADict(Pair):
    def forward(self, x):
        box = {"a": x}
        q = self.q(x)
        box["a"].mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class StoredIntoADict(Pair):
    def forward(self, x):
        box = {}
        box["a"] = x
        q = self.q(x)
        box["a"] += 1
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class GotFromADict(Pair):
    def forward(self, x):
        box = dict(a=x)
        q = self.q(x)
        box.get("a").mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class DefaultOfADict(Pair):
    def forward(self, x):
        box = {}
        q = self.q(x)
        box.setdefault("a", x).mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class UpdatedDict(Pair):
    def forward(self, x):
        box = {}
        box.update(a=x)
        q = self.q(x)
        box.pop("a").mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class MergedDict(Pair):
    def forward(self, x):
        box = {**{"a": x}, "b": 1} | {}
        q = self.q(x)
        box["a"].mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class ValuesOfADict(Pair):
    def forward(self, x):
        box = {"a": x}
        q = self.q(x)
        for t in box.values():
            t.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class ItemsOfADict(Pair):
    def forward(self, x):
        box = {name: x for name in "ab"}
        q = self.q(x)
        for name, t in box.items():
            t.mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class Nested(Pair):
    def forward(self, x):
        box = {"a": [(1, x)]}
        q = self.q(x)
        box["a"][0][1].mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class DictToAMethod(Pair):
    def change(self, box):
        box["a"].mul_(2)

    def forward(self, x):
        box = {"a": x}
        q = self.q(x)
        self.change(box)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class MethodPutsItIn(Pair):
    def put(self, box, t):
        box.append(t)

    def forward(self, x):
        box = []
        self.put(box, x)
        q = self.q(x)
        box[0].mul_(2)
        return q, self.k(x)


@cases.refuses(*WRITTEN)
class ListOnSelf(Pair):
    def forward(self, x):
        self.kept = [x]
        q = self.q(x)
        self.kept[0].mul_(2)
        return q, self.k(x)


class Doubling(list):
    def __init__(self, tensor):
        super().__init__()
        self.tensor = tensor

    def append(self, item):
        with torch.no_grad():
            self.tensor.mul_(2)
        super().append(item)


def plain_list():
    return torch.randn(2, 3, 8), []


def doubling_list():
    x = torch.randn(2, 3, 8)
    return x, Doubling(x)


@cases.refuses("input-may-be-written", "trace-stopped", inputs=(plain_list, doubling_list))
class AppendsToWhatTheCallerHandsIn(Pair):
    def forward(self, x, outs):
        q = self.q(x)
        outs.append(q)
        return q, self.k(x)


# -- what writes no tensor, or none that shares with the input ----------------------------------------------


@cases.fuses("q k")
class OutputsIntoAList(Pair):
    def forward(self, x):
        outs = []
        outs.append(self.q(x))
        outs.append(self.k(x))
        return outs


@cases.fuses("q k")
class OutputsIntoADict(Pair):
    def forward(self, x):
        outs = {}
        outs["q"] = self.q(x)
        outs["k"] = self.k(x)
        return outs


@cases.fuses("q k")
class OutputsInADisplay(Pair):
    def forward(self, x):
        return {"q": self.q(x), "both": [self.k(x), 1]}


@cases.fuses("q k")
class AppendsTheInput(Pair):
    def forward(self, x):
        box = []
        q = self.q(x)
        box.append(x)
        return q, self.k(x), box


@cases.fuses("q k")
class PopsAnother(Pair):
    def forward(self, x):
        box = [x, 2, 3]
        q = self.q(x)
        n = box.pop() + len(box)
        return q * n, self.k(x)


@cases.fuses("q k")
class ReplacesTheEntry(Pair):
    def forward(self, x):
        box = [x]
        q = self.q(x)
        box[0] = 1
        return q, self.k(x), box


@cases.fuses("q k")
class WritesFreshInAList(Pair):
    def forward(self, x):
        box = [x + 1, x * 2]
        q = self.q(x)
        for t in box:
            t.mul_(2)
        return q, self.k(x), box


@cases.fuses("q k")
class WritesFreshInADict(Pair):
    def forward(self, x):
        box = {"a": x.clone()}
        q = self.q(x)
        box["a"] += 1
        return q, self.k(x), box


@cases.fuses("q k")
class UnpacksFresh(Pair):
    def forward(self, x):
        a, *rest = [x + 1, x + 2, x + 3]
        q = self.q(x)
        rest[1].mul_(2)
        return q, self.k(x), rest


@cases.may_fuse("q k", but=WRITTEN)
class WritesAnotherEntry(Pair):
    def forward(self, x):
        box = [x, x + 1]
        q = self.q(x)
        box[1].mul_(2)
        return q, self.k(x), box


@cases.fuses("q k")
class WritesTheEntryAfterwards(Pair):
    def forward(self, x):
        box = [x]
        q, k = self.q(x), self.k(x)
        box[0].mul_(2)
        return q, k


@cases.fuses("q k")
class NameOfAnEntry(Pair):
    def forward(self, x):
        box = {"a": [x]}
        h = box["a"][0]
        return self.q(h), self.k(h)


@cases.may_fuse("q k", but=("different-inputs",))
class ReadsAnEntry(Pair):
    def forward(self, x):
        box = {"a": x}
        return self.q(box["a"]), self.k(box["a"])


@cases.refuses()
class EntryStoredBetween(Pair):
    def forward(self, x):
        box = {"a": x}
        q = self.q(box["a"])
        box["a"] = x * 2
        return q, self.k(box["a"])


@cases.fuses("q k")
class LoopsOverNumbers(Pair):
    def forward(self, x):
        q = self.q(x)
        for n, m in zip([1, 2], range(2), strict=True):
            q = q + n * m
        return q, self.k(x)


@cases.fuses("q k")
class SumsAList(Pair):
    def forward(self, x):
        q = self.q(x)
        total = sum([q, x]) + torch.cat([q, x], -1).sum()
        return total, self.k(x)


@cases.fuses("q k")
class FormatsAndSlices(Pair):
    def forward(self, x):
        names = ["a", "b", "c"]
        q = self.q(x)
        text = ", ".join(names[1:]) + f"{len(names)}"
        return q, self.k(x), text


test_case, test_values, test_verdict = cases.tests()
