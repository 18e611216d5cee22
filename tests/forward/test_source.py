"""The forward that really runs, or a refusal: never another text."""

import __future__

import linecache
import os
import types

import pytest
import torch
import torch.nn as nn

from fusekit.forward import NoSource, Span, forward_chain, source, text_at


def refused(module: nn.Module) -> str:
    with pytest.raises(NoSource) as caught:
        source(module)
    return caught.value.reason


def test_source_holds_the_lines_of_the_def_as_in_the_file(load):
    module = load(
        """
        class A(nn.Module):
            def forward(self, x):  # a comment
                return x + 1

            other = 2
        """
    )
    found = source(module.A())
    assert found.text == "    def forward(self, x):  # a comment\n        return x + 1\n"
    assert (found.path, found.line, found.wrappers) == (module.__file__, 6, ())
    assert (found.tree.lineno, found.tree.col_offset, found.tree.name) == (6, 4, "forward")
    assert found.name == "A.forward" and found.class_name == "A" and found.self_name == "self"


@pytest.mark.parametrize("wraps", [True, False])
def test_decorators_are_looked_through_three_deep(load, wraps):
    module = load(
        f"""
        def deco(f):
            {"@functools.wraps(f)" if wraps else ""}
            def wrapped(self, *args):
                return f(self, *args)
            return wrapped

        class A(nn.Module):
            @deco
            @deco
            @deco
            def forward(self, x):
                return x * 3
        """
    )
    found = source(module.A())
    assert found.text.startswith("    @deco\n") and found.text.endswith("return x * 3\n")
    assert found.wrappers == ("deco.<locals>.wrapped",) * 3
    assert found.function.__code__.co_qualname == "A.forward"


def test_wrapped_that_lies_is_not_believed(load):
    module = load(
        """
        def liar(f):
            def wrapped(self, x):
                return f(self, x)
            wrapped.__wrapped__ = lambda self, x: "a lie"
            return wrapped

        class A(nn.Module):
            @liar
            def forward(self, x):
                return x * 5
        """
    )
    assert "x * 5" in source(module.A()).text


def test_wrapped_without_a_cell_is_refused(load):
    module = load(
        """
        class A(nn.Module):
            def true(self, x):
                return x

        def stand_in(self, x):
            return x + 1

        stand_in.__wrapped__ = A.true
        A.forward = stand_in
        """
    )
    assert refused(module.A()) == "decorated"


def test_wrapper_that_holds_two_forwards_is_refused(load):
    module = load(
        """
        class Base(nn.Module):
            def forward(self, x):
                return x

        class A(Base):
            def forward(self, x):
                return x + 1

        def either(f, g):
            def wrapped(self, x):
                return f(self, x) if self.training else g(self, x)
            return wrapped

        A.forward = either(A.forward, Base.forward)
        """
    )
    assert refused(module.A()) == "decorated"


def test_decorator_that_is_an_object_is_refused(load):
    module = load(
        """
        class deco:
            def __init__(self, f):
                self.f = f
            def __get__(self, owner, cls):
                return functools.partial(self.f, owner)

        class A(nn.Module):
            @deco
            def forward(self, x):
                return x
        """
    )
    assert refused(module.A()) == "decorated"


def test_forward_bound_on_the_instance_is_the_one_that_runs(load):
    module = load(
        """
        class A(nn.Module):
            def __init__(self):
                super().__init__()
                self.forward = self.fast
            def forward(self, x):
                return x
            def fast(self, x):
                return x * 3
        """
    )
    assert "x * 3" in source(module.A()).text


def test_forward_on_the_instance_that_is_not_bound_to_it_is_refused(load):
    module = load(
        """
        class A(nn.Module):
            def forward(self, x):
                return x

        def plain(x):
            return x.shape
        """
    )
    for own in (module.plain, module.A().forward, torch.relu):
        a = module.A()
        a.forward = own
        assert refused(a) == "instance-forward"


def test_forward_from_exec_has_no_source():
    namespace = {"nn": nn}
    exec("class A(nn.Module):\n    def forward(self, x):\n        return x\n", namespace)
    assert refused(namespace["A"]()) == "no-source"


def test_text_of_another_file_under_the_name_is_stale(load):
    module = load("class A(nn.Module):\n    def forward(self, x):\n        return x\n")
    text = "\n" * 3 + "class A(nn.Module):\n    def forward(self, x):\n        return -x\n"
    exec(compile(text, module.__file__, "exec"), module.__dict__)
    assert refused(module.A()) == "source-is-stale"


def test_lambda_has_no_def(load):
    module = load("class A(nn.Module):\n    forward = lambda self, x: x + 1\n")
    assert refused(module.A()) == "no-source"


def test_file_edited_since_its_import_is_stale(load):
    module = load("class A(nn.Module):\n    def forward(self, x):\n        return x + 1\n")
    text = open(module.__file__).read()
    open(module.__file__, "w").write(text.replace("x + 1", "x + 2"))
    os.utime(module.__file__, (1, 1))
    assert refused(module.A()) == "source-is-stale"


def test_file_that_moved_its_lines_is_stale(load):
    module = load("class A(nn.Module):\n    def forward(self, x):\n        return x + 1\n")
    text = open(module.__file__).read()
    open(module.__file__, "w").write("\n" + text)
    assert refused(module.A()) == "source-is-stale"


def test_file_that_is_no_longer_python_is_stale(load):
    module = load("class A(nn.Module):\n    def forward(self, x):\n        return x + 1\n")
    open(module.__file__, "a").write("\ndef half(:\n")
    assert refused(module.A()) == "source-is-stale"


def test_file_that_is_gone_is_no_source(load):
    module = load("class A(nn.Module):\n    def forward(self, x):\n        return x + 1\n")
    os.remove(module.__file__)
    linecache.checkcache()
    assert refused(module.A()) == "no-source"


def test_class_in_a_function_keeps_its_closure(load):
    module = load(
        """
        def build(k):
            class A(nn.Module):
                def forward(self, x):
                    return x * k
            return A
        """
    )
    found = source(module.build(2)())
    assert found.text.strip().endswith("return x * k")
    assert found.function.__closure__[0].cell_contents == 2


def test_forward_borrowed_from_another_class_is_that_one(load):
    module = load(
        """
        class A(nn.Module):
            def forward(self, x):
                return x * 7

        class B(nn.Module):
            forward = A.forward
        """
    )
    assert "x * 7" in source(module.B()).text and source(module.B()).class_name == "A"


@pytest.mark.parametrize("wraps", [True, False])
def test_decorated_forward_borrowed_from_another_class_is_looked_through(load, wraps):
    module = load(
        f"""
        def deco(f):
            {"@functools.wraps(f)" if wraps else ""}
            def wrapped(self, *args):
                return f(self, *args)
            return wrapped

        class A(nn.Module):
            @deco
            def forward(self, x):
                return x * 7

        class B(nn.Module):
            forward = A.forward
        """
    )
    assert "x * 7" in source(module.B()).text


def test_forward_replaced_after_a_first_look_is_seen(load):
    module = load(
        """
        class A(nn.Module):
            def forward(self, x):
                return x + 1

        def other(self, x):
            return x + 2
        """
    )
    a = module.A()
    assert "x + 1" in source(a).text
    module.A.forward = module.other
    assert "x + 2" in source(a).text


def test_code_replaced_after_a_first_look_is_seen(load):
    module = load(
        """
        class A(nn.Module):
            def forward(self, x):
                return x + 1

        def other(self, x):
            return x + 2
        """
    )
    a = module.A()
    assert "x + 1" in source(a).text
    module.A.forward.__code__ = module.other.__code__
    assert "x + 2" in source(a).text


def test_wrapper_whose_cell_changes_after_a_first_look_is_seen(load):
    module = load(
        """
        def deco(f):
            def wrapped(self, x):
                return f(self, x)
            return wrapped

        class A(nn.Module):
            @deco
            def forward(self, x):
                return x + 1

        class B(A):
            def forward(self, x):
                return x + 2
        """
    )
    assert "x + 1" in source(module.A()).text
    module.A.forward.__closure__[0].cell_contents = module.B.__dict__["forward"]
    assert "x + 2" in source(module.A()).text


def test_equal_code_of_two_files_keeps_its_own_text(load):
    text = "class A(nn.Module):\n    def forward(self, x):\n        return x + 1  # {}\n"
    one, two = load(text.format("one")), load(text.format("two"))
    assert one.A.forward.__code__ == two.A.forward.__code__
    assert "# one" in source(one.A()).text and "# two" in source(two.A()).text
    assert source(two.A()).path == two.__file__


def test_notebook_cell_has_source(cell):
    names = cell(
        """
        import torch.nn as nn
        class A(nn.Module):
            def forward(self, x):
                return x + 1
        """
    )
    assert source(names["A"]()).text == "    def forward(self, x):\n        return x + 1\n"


def test_cell_under_the_future_imports_of_an_earlier_one_has_source(cell):
    flags = __future__.annotations.compiler_flag
    names = cell(
        "class A(nn.Module):\n    def forward(self, x: Unknown) -> Unknown:\n        return x\n",
        {"nn": nn, "__name__": "__main__"},
        flags,
    )
    assert "Unknown" in source(names["A"]()).text


def test_cell_run_again_under_another_name_is_another_source(cell):
    text = "class A(nn.Module):\n    def forward(self, x):\n        return x + {}\n"
    first = cell(text.format(1), {"nn": nn})["A"]
    second = cell(text.format(2), {"nn": nn})["A"]
    assert "x + 1" in source(first()).text and "x + 2" in source(second()).text


CLASS = "class A(nn.Module):\n"
DEF = "    def forward(self, x):\n"
ODD = {
    "form feed": f"{CLASS}    x = 1\n\f\n{DEF}        return x + 1\n",
    "form feed inside": f"{CLASS}{DEF}\n\f\n        return x + 1\n",
    "line separator": f'{CLASS}    t = "\u2028"\n{DEF}        return x + 1\n',
    "non-ascii": f'{CLASS}    def forward(self, ü):\n        "é€😀"; return ü + 1\n',
    "column 0": f'{CLASS}{DEF}        t = """\nzero\n"""\n        return x + 1\n',
    "no last line end": f"{CLASS}{DEF}        return x + 1",
    "tabs": f"{CLASS}\tdef forward(self, x):\n\t\treturn x + 1\n",
    "continued": f"{CLASS}{DEF}        return x \\\n            + 1\n",
    "one line": f"{CLASS}    def forward(self, x): return x + 1\n",
    "in an if": f"{CLASS}    if True:\n        def forward(self, x):\n            return x + 1\n",
}


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("text", ODD.values(), ids=ODD.keys())
def test_odd_texts_give_the_def_and_true_positions(load, text, line_end):
    whole = "import torch.nn as nn\n" + text
    module = load(whole.replace("\n", line_end).encode())
    found = source(module.A())
    lines = whole.split("\n")
    assert found.text.split("\n")[0] == lines[found.line - 1]
    assert found.text.rstrip().endswith("+ 1")
    returned = found.tree.body[-1]
    assert text_at(found.file_text, Span.of(returned)).replace("\\\n            ", "").endswith("+ 1")
    assert text_at(found.file_text, Span.of(returned)).startswith("return")


def test_byte_order_mark_and_encoding_cookie_are_read(load):
    text = "class A(nn.Module):\n    def forward(self, x):\n        'é'; return x + 1\n"
    marked = load(b"\xef\xbb\xbfimport torch.nn as nn\n" + text.encode())
    cookie = load(b"# -*- coding: latin-1 -*-\nimport torch.nn as nn\n" + text.encode("latin-1"))
    assert "'é'" in source(marked.A()).text and "'é'" in source(cookie.A()).text


def test_def_of_the_same_name_elsewhere_is_not_taken(load):
    module = load(
        """
        class B(nn.Module):
            def forward(self, x): return x + 1
        class A(nn.Module):
            class Inner(nn.Module):
                def forward(self, x): return x + 1
            def forward(self, x): return x + 2
        """
    )
    assert "x + 2" in source(module.A()).text
    inner = source(module.A.Inner())
    assert (inner.class_name, inner.line) == ("Inner", 9)


def test_source_of_no_module_names_what_it_got():
    with pytest.raises(RuntimeError, match="not int"):
        source(3)


def test_stale_answer_names_the_file(load):
    module = load("class A(nn.Module):\n    def forward(self, x):\n        return x + 1\n")
    open(module.__file__, "w").write("x = 1\n")
    with pytest.raises(NoSource, match="edited after it was imported") as caught:
        source(module.A())
    assert (caught.value.path, caught.value.line) == (module.__file__, 5)


FAMILIES = "bert bart gpt2 llama mistral qwen3 qwen3_moe gemma3 olmo2 t5 mamba deepseek_v3 phi3 vit whisper"


@pytest.mark.parametrize("family", FAMILIES.split())
def test_every_forward_of_transformers_resolves_to_the_code_that_runs(family):
    modeling = __import__(f"transformers.models.{family}.modeling_{family}", fromlist=["x"])
    classes = [
        value
        for value in vars(modeling).values()
        if isinstance(value, type)
        and issubclass(value, nn.Module)
        and value.__module__ == modeling.__name__
        and "forward" in value.__dict__
    ]
    assert len(classes) >= 4
    for cls in classes:
        found = source(cls.__new__(cls))
        code = found.function.__code__
        assert code.co_qualname == f"{cls.__qualname__}.forward"
        assert code.co_filename == modeling.__file__ == found.path
        assert code in _codes_of(found.file_text, found.path)
        assert found.tree.name == "forward" and found.class_name == cls.__name__
        assert forward_chain(cls.__new__(cls))[0] is cls.forward


def _codes_of(text, path, cache={}):
    if path not in cache:
        found, todo = [], [compile(text, path, "exec", dont_inherit=True)]
        while todo:
            code = todo.pop()
            found.append(code)
            todo += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        cache[path] = found
    return cache[path]
