"""What may share storage, what is written, and what was seen of it."""

import torch
import torch.nn as nn

from fusekit.tracing import aliasing


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
    assert list(frame.columns) == ["kind", "names", "line", "text", "evidence", "observed"]
    assert {"alias set", "write"} == set(frame.kind)


def test_report_of_a_forward_that_stops_says_so():
    def forward(self, x):
        y = x[0]
        y.add_(1)
        return float(y.sum())

    found = report(forward)
    assert found.stopped is not None and found.writes[0].names == ("x", "y")
