"""What may share storage, what is written, and what was seen of it."""

import torch
import torch.nn as nn

from fusekit.forward.effects import switched_off
from fusekit.tracing import aliasing
from tests.tracing.witnesses import contradictions


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.act = nn.ReLU(inplace=True)


def report(function):
    """The alias report of a module whose forward is `function`."""
    cls = type("A", (Net,), {"forward": function})
    return aliasing(cls().eval())


def sets(found):
    return [set(alias.names) for alias in found.sets]


def test_view_and_its_base_are_one_set_and_a_write_shows_both_names():
    def forward(self, x):
        half = x[:, :4]
        half.add_(1)
        return half

    found = report(forward)
    assert {"x", "half"} in sets(found)
    (write,) = found.writes
    assert (write.names, write.text, write.observed) == (("half", "x"), "half.add_(1)", True)
    assert write.line == forward.__code__.co_firstlineno + 2
    (alias,) = [alias for alias in found.sets if "half" in alias.names]
    assert ("x[:, :4]", "view", True) in [(e.text, e.kind, e.observed) for e in alias.evidence]


def test_outputs_of_linears_stand_alone():
    def forward(self, x):
        a = self.q(x)
        b = self.q(a) + 1
        return a, b

    assert sorted(map(sorted, sets(report(forward)))) == [["a"], ["b"], ["x"]]


def test_chunks_share_with_what_they_are_chunks_of():
    def forward(self, x):
        a, b = x.chunk(2)
        a.mul_(2)
        return b

    found = report(forward)
    assert any({"x", "a"} <= names for names in sets(found))
    assert any({"x", "b"} <= names for names in sets(found))
    assert {"x", "a"} <= set(found.writes[0].names)


def test_contiguous_of_a_contiguous_tensor_is_the_same_object():
    def forward(self, x):
        y = x.contiguous()
        return y.mul_(2)

    found = report(forward)
    assert {"x", "y"} in sets(found)
    assert ("same object", True) in [(e.kind, e.observed) for alias in found.sets for e in alias.evidence]
    assert found.writes[0].names == ("x", "y")


def test_submodule_may_return_its_input():
    def forward(self, x):
        y = self.drop(x)
        y.add_(1)
        return y

    found = report(forward)
    assert {"x", "y"} in sets(found) and found.writes[0].names == ("x", "y")


def test_write_inside_of_a_submodule_is_listed():
    def forward(self, x):
        y = self.q(x)
        z = self.act(y)
        return z

    found = report(forward)
    assert [(write.text, write.names) for write in found.writes] == [("self.act(y)", ("y", "z"))]


def test_copy_that_was_made_on_this_path_is_a_view_that_was_not_observed():
    def forward(self, x):
        y = x.transpose(1, 2).reshape(-1)
        return y

    (alias,) = [alias for alias in report(forward).sets if "y" in alias.names]
    assert False in [e.observed for e in alias.evidence] or alias.names == ("y",)


def test_data_shares_and_its_write_is_seen():
    def forward(self, x):
        y = x.data
        y.add_(1)
        return x

    found = report(forward)
    assert {"x", "y"} in sets(found) and found.writes[0].names == ("x", "y")


def test_write_through_a_view_of_a_view():
    def forward(self, x):
        y = x.view(-1)[2:]
        z = y.unsqueeze(0).expand(2, -1)
        y[0] = 1
        return z

    found = report(forward)
    assert any({"x", "y", "z"} <= names for names in sets(found))
    assert set(found.writes[0].names) == {"x", "y", "z"}


def test_arithmetic_is_fresh_and_so_is_what_comes_of_it():
    def forward(self, x):
        y = x + 0
        y.mul_(2)
        z = torch.cat([x])
        return y, z

    found = report(forward)
    assert {"x"} in sets(found) and found.writes[0].names == ("y",)


def test_frame_has_a_row_for_each_set_and_write():
    def forward(self, x):
        y = x.view(-1)
        y.add_(1)
        return y

    frame = report(forward).to_frame()
    columns = ["kind", "names", "line", "text", "evidence", "rule", "may", "observed"]
    assert list(frame.columns) == columns
    assert {"alias set", "write"} == set(frame.kind)
    assert list(frame.evidence) == ["view", "writes"] and list(frame.may) == ["may", "surely"]


def test_report_of_a_forward_that_stops_says_so():
    def forward(self, x):
        y = x[0]
        y.add_(1)
        return float(y.sum())

    found = report(forward)
    assert found.stopped is not None and found.writes[0].names == ("x", "y")


def test_each_step_has_its_rule_and_each_write_too():
    def forward(self, x):
        h = x.view(-1)
        h.mul_(2)
        return h

    found = report(forward)
    (alias,) = found.sets
    (step,) = alias.evidence
    assert (step.text, step.rule) == ("x.view(-1)", "aten::view returns a view of its input")
    (write,) = found.writes
    assert write.surely and write.rule == "writes in place (aten::mul_)" and found.notes == ()


def test_an_arm_that_was_not_taken_counts_and_says_that_it_did_not_run():
    def forward(self, x, flag: bool = False):
        h = self.q(x)
        if flag:
            h = x[0]
            h.add_(1)
        return h

    found = report(forward)
    assert {"x", "h"} in sets(found)
    (alias,) = [alias for alias in found.sets if "h" in alias.names]
    (step,) = alias.evidence
    assert step.observed is None and step.not_run == "`flag` was false"
    (write,) = found.writes
    assert (write.names, write.observed, write.not_run) == (("h", "x"), None, "`flag` was false")
    rules = found.to_frame().rule
    assert all("(not run: `flag` was false)" in rule for rule in rules if rule)


def test_the_other_arm_of_an_expression_did_not_run():
    def forward(self, x, flag: bool = False):
        h = x.view(-1) if flag else x + 1
        return h

    (alias,) = [one for one in report(forward).sets if one.evidence]
    assert [(e.text, e.not_run) for e in alias.evidence] == [("x.view(-1)", "`flag` was false")]


def test_what_stands_behind_a_stop_is_told_and_was_not_run():
    def forward(self, x):
        y = float(x.sum())
        h = x.t()
        h.mul_(y)
        return h

    found = report(forward)
    assert {"x", "h"} in sets(found) and found.stopped is not None
    (write,) = found.writes
    assert write.names == ("h", "x") and write.observed is None
    assert write.not_run == f"the trace stopped before it, at line {found.stopped.line}"


def test_an_item_of_a_list_is_what_was_put_into_it():
    def forward(self, x):
        kept = [x, self.q(x)]
        h = kept[0]
        other = kept[1]
        h.add_(1)
        return other

    found = report(forward)
    assert {"x", "h"} in sets(found) and not any({"x", "other"} <= names for names in sets(found))
    (alias,) = [alias for alias in found.sets if "h" in alias.names]
    (step,) = alias.evidence
    assert (step.kind, step.text, step.observed) == ("item", "kept[0]", True)


def test_a_helper_that_writes_is_told_with_its_name():
    def forward(self, x):
        def scale(t):
            t.mul_(2)

        scale(x)
        return x

    (write,) = report(forward).writes
    assert write.surely and write.names == ("x",) and "t.mul_(2) writes in place" in write.rule


def test_code_that_is_not_known_may_write_and_is_not_sure():
    def forward(self, x, cache=None):
        if cache is not None:
            cache.update(x)
        return x

    (write,) = report(forward).writes
    assert not write.surely and {"x", "cache"} <= set(write.names)
    assert write.not_run == "`cache is not None` was false"


def test_inputs_are_no_set_but_a_note_says_that_they_may_be_one():
    def forward(self, x, y):
        y.add_(1)
        return self.q(x)

    found = report(forward)
    assert {"x", "y"} not in sets(found)
    assert found.writes[0].names == ("y",) and "one tensor for several inputs" in found.notes[0]


def test_inputs_that_are_one_tensor_were_seen_to_be():
    def forward(self, x, y):
        y.add_(1)
        return self.q(x)

    x = torch.randn(2, 4)
    found = aliasing(type("A", (Net,), {"forward": forward})(), x, x)
    (alias,) = found.sets
    assert alias.names == ("x", "y") and alias.evidence[0].kind == "seen only"
    assert found.writes[0].names == ("x", "y")


def test_a_write_into_a_tensor_of_the_module_says_where():
    def forward(self, x):
        self.q.weight.data.add_(1)
        return self.q(x)

    (write,) = report(forward).writes
    assert write.names == () and write.elsewhere == ("weight",) and write.observed


def test_a_forward_that_sees_its_names_is_not_followed_and_says_so():
    def forward(self, x):
        eval("x.mul_(2)")
        return x

    found = report(forward)
    assert "eval()" in found.failed and ("x",) in [write.names for write in found.writes]


def test_a_write_that_nobody_sees_is_none():
    def forward(self, x):
        return (x + 1).mul_(2)

    assert report(forward).writes == ()


def test_what_the_text_misses_and_the_run_saw_counts_and_says_so():
    def forward(self, x):
        h = x.view(-1)
        h.mul_(2)
        return h

    cls = type("A", (Net,), {"forward": forward})
    assert contradictions(cls()) == []
    with switched_off("views"):
        found = aliasing(cls())
        assert contradictions(cls()) == ["h and x share storage", f"line {found.writes[0].line} writes h, x"]
    (alias,) = found.sets
    assert alias.names == ("h", "x") and [e.kind for e in alias.evidence] == ["seen only"]
    (write,) = found.writes
    assert write.names == ("h", "x") and write.rule.endswith("no rule says so")
