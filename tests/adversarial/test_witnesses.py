"""What a run on meta saw of forwards made to deceive is among what the analysis of their text allows."""

import importlib
from pathlib import Path

import pytest

from fusekit.tracing.recorder import tensors_in
from tests.tracing.witnesses import contradictions

FILES = sorted(
    path.stem for path in Path(__file__).parent.glob("test_*.py") if "cases = Cases()" in path.read_text()
)


def test_every_file_of_cases_is_found():
    assert len(FILES) > 8


@pytest.mark.parametrize("file", [name for name in FILES if name != Path(__file__).stem])
def test_the_text_allows_what_a_run_saw(file):
    found = []
    for case in importlib.import_module(f"tests.adversarial.{file}").cases:
        found += [f"{case}: {what}" for what in contradictions(case.module())]
        for inputs in (make() for make in case.inputs):
            if len({tensor.untyped_storage()._cdata for tensor in tensors_in(inputs)}) == len(inputs):
                found += [f"{case}, with inputs: {what}" for what in contradictions(case.module(), *inputs)]
    assert found == []
