"""Where the source names the values that no operator makes: parameters, attributes of self, the result."""

import ast
from collections.abc import Iterator

from torch import fx

from fusekit.forward import ForwardSource, Span
from fusekit.forward.reads import attribute_chain


def place_values(graph: fx.Graph, source: ForwardSource) -> None:
    """Give the placeholders, `get_attr` nodes and the output of a trace their spans.

    A placeholder's is its parameter in the signature, a `get_attr` node's the first `self.<path>` that
    reads it, the output's the returned expression where there is one `return`. None where there is
    no such place. Nothing is evaluated for these nodes: they are never `direct`.
    """
    arguments = source.tree.args
    signature = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    signature += [extra for extra in (arguments.vararg, arguments.kwarg) if extra is not None]
    parameters = {argument.arg: Span.of(argument) for argument in signature}
    reads: dict[str, Span] = {}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            path = ".".join(attribute_chain(node, source.self_name))
            if path:
                reads[path] = min(Span.of(node), reads.get(path, Span.of(node)))
    returned = [node.value for node in _returns(source.tree)]
    result = Span.of(returned[0]) if len(returned) == 1 and returned[0] is not None else None
    for made in graph.nodes:
        if made.op == "placeholder":
            made.meta.update(span=parameters.get(made.target), direct=False)
        elif made.op == "get_attr":
            made.meta.update(span=reads.get(made.target), direct=False)
        elif made.op == "output":
            made.meta.update(span=result, direct=False)


def _returns(node: ast.AST) -> Iterator[ast.Return]:
    """The returns of a function, not those of functions defined in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Return):
            yield child
        elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.expr)):
            yield from _returns(child)
