"""The edited text as a function in the original's place."""

import inspect
import traceback

import pytest
import torch
import torch.nn as nn

from fusekit.errors import FusekitError
from fusekit.forward import Edit, NoSource, Span, compile_edited, edited_text, source

X = torch.tensor([1.0, 2.0])


def replaced(found, old: str, new: str) -> list[Edit]:
    """The edit that puts `new` for the only `old` of a forward."""
    assert found.text.count(old) == 1
    before = found.text[: found.text.index(old)].split("\n")
    line, column = found.line + len(before) - 1, len(before[-1].encode())
    return [Edit(Span(line, column, line, column + len(old.encode())), new)]


def again(module: nn.Module, *change: str, names: dict | None = None):
    """The forward of `module` with a change made, wrappers around it, bound to the module."""
    found = source(module)
    edits = replaced(found, *change) if change else []
    return compile_edited(found, edits, names or {})[0].__get__(module)


PLAIN = """
class A(nn.Module):
    def forward(self, x, *, scale: float = 3.0, y: "Later" = 1) -> torch.Tensor:
        '''What it does.'''
        return x * scale + y
"""


def test_no_edits_give_an_equal_function(load):
    a = load(PLAIN).A()
    made, original = again(a).__func__, type(a).forward
    assert made is not original and torch.equal(made(a, X), original(a, X))
    assert made.__code__.co_code == original.__code__.co_code
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__defaults__", "__kwdefaults__"):
        assert getattr(made, name) == getattr(original, name)
    assert made.__annotations__ == original.__annotations__ and made.__globals__ is original.__globals__
    assert inspect.signature(made) == inspect.signature(original)


def test_defaults_are_the_same_objects_but_changes_of_kwdefaults_stay_apart(load):
    a = load("class A(nn.Module):\n    def forward(self, x, seen=[], *, k=1):\n        return seen\n").A()
    made = again(a).__func__
    assert made(a, X) is type(a).forward(a, X)
    made.__kwdefaults__["k"] = 2
    assert type(a).forward.__kwdefaults__ == {"k": 1}


def test_edit_changes_what_it_names_and_nothing_else(load):
    a = load(PLAIN).A()
    assert torch.equal(again(a, "x * scale", "x - scale")(X, scale=2.0), X - 2.0 + 1)
    assert torch.equal(a(X, scale=2.0), X * 2.0 + 1)


def test_closure_shares_the_original_cells(load):
    module = load(
        """
        def build(k):
            class A(nn.Module):
                def forward(self, x):
                    return x * k
            def change(new):
                nonlocal k
                k = new
            return A(), change
        """
    )
    a, change = module.build(2.0)
    made = again(a, "x * k", "x + k")
    assert torch.equal(made(X), X + 2)
    change(10.0)
    assert torch.equal(made(X), X + 10)


def test_nonlocal_writes_reach_the_original_cell(load):
    module = load(
        """
        def build():
            count = 0
            class A(nn.Module):
                def forward(self, x):
                    nonlocal count
                    count += 1
                    return x
            return A(), lambda: count
        """
    )
    a, count = module.build()
    again(a)(X)
    assert count() == 1


def test_super_without_arguments_and_class_cell_work(load):
    module = load(
        """
        class Base(nn.Module):
            def forward(self, x):
                return x + 1
        class A(Base):
            def forward(self, x):
                assert __class__ is A
                return super().forward(x) * 2
        class B(A):
            pass
        """
    )
    assert torch.equal(again(module.B(), "* 2", "* 3")(X), (X + 1) * 3)


def test_class_that_its_own_method_names_in_a_function(load):
    module = load(
        """
        def build():
            class A(nn.Module):
                k = 4.0
                def forward(self, x):
                    return x * A.k + len([A for _ in range(2)])
            return A
        """
    )
    assert torch.equal(again(module.build()(), "x * A", "x + A")(X), X + 4 + 2)


@pytest.mark.parametrize("name", ["A", "_A", "__A"])
def test_private_names_are_those_of_the_class(load, name):
    module = load(
        f"""
        class {name}(nn.Module):
            def __init__(self):
                super().__init__()
                self.__w = 3.0
            def forward(self, x, __y=1):
                __z = self.__w
                return x * __z + __y
        """
    )
    a = getattr(module, name)()
    assert torch.equal(again(a, "x * __z", "x - self.__w")(X), X - 3 + 1)


def test_no_grad_around_the_forward_stays(load):
    module = load(
        """
        class A(nn.Linear):
            @torch.no_grad()
            def forward(self, x):
                return super().forward(x)
        """
    )
    a = module.A(2, 2)
    result = again(a, "super().forward(x)", "super().forward(x) + 1")(X)
    assert not result.requires_grad and torch.allclose(result, a(X) + 1)


def test_wrappers_three_deep_are_each_kept_and_the_original_untouched(load):
    module = load(
        """
        calls = []
        def deco(tag):
            def outer(f):
                @functools.wraps(f)
                def wrapped(self, *args):
                    calls.append(tag)
                    return f(self, *args)
                return wrapped
            return outer
        class A(nn.Module):
            @deco("a")
            @deco("b")
            @deco("c")
            def forward(self, x):
                return x + 1
        """
    )
    a = module.A()
    made = again(a, "x + 1", "x + 5")
    assert torch.equal(made(X), X + 5) and module.calls == ["a", "b", "c"]
    assert torch.equal(a(X), X + 1)
    assert inspect.unwrap(made.__func__)(a, X).tolist() == (X + 5).tolist()


def test_wrapper_that_holds_the_forward_in_a_list_too_is_refused(load):
    module = load(
        """
        def deco(f):
            kept = [f]
            def wrapped(self, x):
                return f(self, x) if self.training else kept[0](self, x)
            return wrapped
        class A(nn.Module):
            @deco
            def forward(self, x):
                return x
        """
    )
    with pytest.raises(NoSource, match="second time") as caught:
        again(module.A())
    assert caught.value.reason == "decorated"


def test_wrapper_that_holds_the_forward_as_a_default_too_is_refused(load):
    module = load(
        """
        def deco(f):
            def wrapped(self, x, g=f):
                return f(self, x) if self.training else g(self, x)
            return wrapped
        class A(nn.Module):
            @deco
            def forward(self, x):
                return x
        """
    )
    with pytest.raises(NoSource, match="second time"):
        again(module.A())


def test_deprecated_argument_is_still_renamed(load):
    module = load(
        """
        from transformers.utils.deprecation import deprecate_kwarg
        class A(nn.Module):
            @deprecate_kwarg("old", version="99.0", new_name="x")
            def forward(self, x):
                return x + 1
        """
    )
    with pytest.warns(FutureWarning):
        assert torch.equal(again(module.A(), "x + 1", "x + 2")(old=X), X + 2)


def test_checkpointing_layer_still_asks_for_itself(load):
    module = load(
        """
        from transformers.modeling_layers import GradientCheckpointingLayer
        class A(GradientCheckpointingLayer):
            def __init__(self):
                super().__init__()
                self.q = nn.Linear(2, 2)
                self.gradient_checkpointing = True
                self.asked = 0
            def _gradient_checkpointing_func(self, function, *args):
                self.asked += 1
                return function(*args)
            def forward(self, x):
                return self.q(x)
        """
    )
    a = module.A().train()
    wrapper = compile_edited(source(a), replaced(source(a), "self.q(x)", "self.q(x) * 2"), {})[0]
    cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__, strict=True))
    assert cells["forward_with_checkpointing"].cell_contents is wrapper
    fused = type("A", (module.A,), {})
    fused.forward = wrapper
    a.__class__ = fused
    assert torch.allclose(a(X), a.q(X) * 2) and a.asked == 1


def test_future_annotations_stay_texts(load):
    text = "from __future__ import annotations\nimport torch.nn as nn\n"
    module = load(
        "class A(nn.Module):\n    def forward(self, x: Not.There) -> Nor[This]:\n        return x\n", text
    )
    made = again(module.A(), "return x", "return x + 1").__func__
    assert made.__annotations__ == {"x": "Not.There", "return": "Nor[This]"}


def test_source_and_traceback_show_the_edited_text(load):
    a = load(
        """
        class A(nn.Module):
            def forward(self, x):
                # a comment that stays
                y = x + 1
                return y.no_such
        """
    ).A()
    made = again(a, "y = x + 1", "y = x + 1; z = 'é'")
    assert "y = x + 1; z = 'é'\n" in inspect.getsource(made) and "that stays" in inspect.getsource(made)
    with pytest.raises(AttributeError) as caught:
        made(X)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    original = source(a)
    assert (last.line, last.lineno, last.name) == ("return y.no_such", original.line + 3, "forward")
    assert last.filename.startswith("<fusekit A.forward ")


def test_inserted_line_moves_the_lines_behind_it(load):
    a = load("class A(nn.Module):\n    def forward(self, x):\n        y = 1\n        raise ValueError\n").A()
    made = again(a, "y = 1", "z = 0\n        y = 1")
    with pytest.raises(ValueError) as caught:
        made(X)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].lineno == source(a).line + 3


def test_source_of_the_result_is_the_edited_one_also_after_clearcache(load):
    import linecache

    module = load("class A(nn.Module):\n    def forward(self, x):\n        return x + 1\n")
    fused = type("A", (module.A,), {})
    fused.forward = again(module.A(), "x + 1", "x + 2").__func__
    linecache.clearcache()
    assert "x + 2" in source(fused()).text


def test_patched_global_is_seen(load):
    module = load("k = 1\nclass A(nn.Module):\n    def forward(self, x):\n        return x * 1 + k\n")
    made = again(module.A(), "x * 1", "x * 2")
    module.k = 100
    assert torch.equal(made(X), X * 2 + 100)


def test_names_do_not_leak(load):
    module = load("class A(nn.Module):\n    def forward(self, x):\n        return x + 1\n")
    before = dict(vars(module))
    made = again(module.A(), "x + 1", "helper(x)", names={"helper": torch.neg})
    assert torch.equal(made(X), -X)
    assert vars(module) == before and not hasattr(module, "helper")
    assert made.__code__.co_freevars == ("helper",)


def test_name_is_not_the_global_of_that_name(load):
    module = load("helper = None\nclass A(nn.Module):\n    def forward(self, x):\n        return x + 1\n")
    made = again(module.A(), "x + 1", "helper(x)", names={"helper": torch.neg})
    assert torch.equal(made(X), -X) and module.helper is None


def test_edit_in_a_forward_after_characters_of_many_bytes(load):
    a = load("class A(nn.Module):\n    def forward(self, x):\n        t = 'é€😀'; return x + 1\n").A()
    assert torch.equal(again(a, "x + 1", "x + len(t)")(X), X + 3)


def test_edited_text_is_the_def_alone(load):
    found = source(load(PLAIN).A())
    after = edited_text(found, replaced(found, "x * scale", "x *\\\n            scale"))
    assert after.startswith("    def forward(") and after.endswith("scale + y\n") and after.count("\n") == 4


def test_edits_that_are_no_python_raise(load):
    found = source(load(PLAIN).A())
    with pytest.raises(FusekitError, match="no Python"):
        compile_edited(found, replaced(found, "x * scale", "x * )"), {})


def test_new_need_for_a_class_cell_is_refused(load):
    a = load("class A(nn.Linear):\n    def forward(self, x):\n        return x\n").A(2, 2)
    with pytest.raises(NoSource, match="__class__"):
        again(a, "return x", "return super().forward(x)")


def test_generator_annotations_and_defaults_with_calls_are_not_run_again(load):
    module = load(
        """
        made = []
        def default():
            made.append(1)
            return 5
        class A(nn.Module):
            def forward(self, x, y=default(), *, z=default()):
                return x + y + z
        """
    )
    assert torch.equal(again(module.A(), "x + y", "x - y")(X), X) and len(module.made) == 2


def test_equal_edits_of_two_classes_keep_their_own_globals(load):
    text = "k = {}\nclass A(nn.Module):\n    def forward(self, x):\n        return x + k\n"
    one, two = load(text.format(1)), load(text.format(2))
    assert torch.equal(again(one.A(), "x + k", "x - k")(X), X - 1)
    assert torch.equal(again(two.A(), "x + k", "x - k")(X), X - 2)
