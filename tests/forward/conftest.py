"""Forwards from files: a text written to a folder, imported, and perhaps edited afterwards."""

import importlib.util
import itertools
import linecache
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

HEADER = "import functools\nimport torch\nimport torch.nn as nn\n"
_numbers = itertools.count()


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., ModuleType]:
    """`load(text)` imports `text`, after the usual imports, as a module from a file of its own."""

    def load(text: str | bytes, header: str = HEADER) -> ModuleType:
        name = f"written_{next(_numbers)}"
        path = tmp_path / f"{name}.py"
        path.write_bytes(text if isinstance(text, bytes) else (header + textwrap.dedent(text)).encode())
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def cell() -> Callable[..., dict]:
    """`cell(text)` runs `text` as a notebook cell: compiled under a name that linecache knows."""

    def run(text: str, namespace: dict | None = None, flags: int = 0) -> dict:
        name = f"/tmp/ipykernel_1/{next(_numbers)}.py"
        text = textwrap.dedent(text)
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        namespace = {} if namespace is None else namespace
        exec(compile(text, name, "exec", flags=flags), namespace)
        return namespace

    return run
