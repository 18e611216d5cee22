"""What holds for every test: no network, one thread, a seed, an Inductor cache of its own."""

import copy
import os
import shutil
import tempfile

# Read when torch, Transformers and tokenizers are imported, so set before any of them is.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# On a busy machine of few cores, threads that wait for each other are thirty times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A cache left by an earlier run would hide that a graph no longer compiles.
INDUCTOR_CACHE = os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="fusekit-inductor-")

import pytest
import torch

torch.set_num_threads(1)


def pytest_unconfigure() -> None:
    shutil.rmtree(INDUCTOR_CACHE, ignore_errors=True)


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same random numbers in a test whether it runs alone or after others."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def smollm2() -> tuple[torch.nn.Module, object]:
    """(model, tokenizer) of the demo model in float32 on the CPU, shared: change nothing in it."""
    from fusekit.notebook.demo import load_smollm2

    return load_smollm2(device="cpu")


@pytest.fixture
def fresh_smollm2(smollm2: tuple) -> tuple[torch.nn.Module, object]:
    """(model, tokenizer) of the demo model, the model a copy that may be changed."""
    model, tokenizer = smollm2
    return copy.deepcopy(model), tokenizer


@pytest.fixture(scope="session")
def minilm() -> tuple[torch.nn.Module, object]:
    """(model, tokenizer) of the small BERT in float32 on the CPU, shared: change nothing in it."""
    from fusekit.notebook.demo import load_minilm

    return load_minilm(device="cpu")
