"""The helpers for fusers of one's own: public, with an example, and used by the library or said not to be."""

from pathlib import Path

import pytest

import fusekit
import fusekit.forward

HELPERS = """
recover_forward compile_forward replace_expr block_chain self_call_and_refs single_self_call
bypass_existence_guard in_boolean_context base_name call_name arg_names rebound_names inplace_target
mutated_names writes_through_args written_names aliasing_reads returns_fresh aliasing_names
""".split()


@pytest.mark.parametrize("name", HELPERS)
def test_helper_has_an_example_and_says_whether_the_library_uses_it(name):
    helper = getattr(fusekit.forward, name)
    assert name in fusekit.forward.__all__ and helper.__module__.startswith("fusekit.forward.")
    assert ">>> " in helper.__doc__
    root = Path(fusekit.__file__).parent
    others = [path for path in root.rglob("*.py") if path.parent != root / "forward"]
    used = any(f"{name}(" in path.read_text() for path in others)
    assert used or "Teaching-only" in helper.__doc__


def test_names_that_the_helpers_rest_on_are_public():
    assert {"METADATA_ATTRS", "DTYPE_CASTS"} <= set(fusekit.forward.__all__)
    assert "shape" in fusekit.forward.METADATA_ATTRS and "type_as" in fusekit.forward.DTYPE_CASTS
