"""A model without weights from a Transformers config: on the meta device, offline, its code not run."""

import contextlib
import json
import logging
import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from fusekit.errors import FusekitError

# Where a config names no class that Transformers has, the first of these that knows its type. Encoders
# and encoder-decoders come first: they are among the causal models too, as half of themselves.
AUTO = (
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForSeq2SeqLM",
    "AutoModelForImageTextToText",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModel",
)
KERNELS = ("attn_implementation", "experts_implementation")  # may name code on a hub: with a slash


@dataclass(frozen=True)
class Built:
    """A model on the meta device, and remarks on what it is not."""

    model: nn.Module
    remarks: tuple[str, ...]


def from_config(path: str | Path, *, trust_remote_code: bool = False) -> Built:
    """The model of a config.json, or of a folder with one, on the meta device.

    It is the class in `architectures` where Transformers has it, else the one of the `AutoModel` that
    fits. No weights are read and nothing is downloaded. Code that lies beside the config runs only
    with `trust_remote_code`. Raises `FusekitError` when there is no such config or no class for it,
    when the class cannot be built, and when Transformers is not installed.
    """
    file = _file(Path(path))
    config = _read(file)
    with quiet():
        transformers = _transformers()
        if trust_remote_code and isinstance(config.get("auto_map"), dict):
            return _from_its_code(transformers, file, config)
        return _from_transformers(transformers, file, config)


def _file(path: Path) -> Path:
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FusekitError(f"there is no config.json in the folder {path}: name one with a saved model")
        return path / "config.json"
    if not path.exists():
        raise FusekitError(
            f"there is no file or folder {path}: name a config.json of Transformers, or a folder with one "
            "(nothing is downloaded, so the name of a model on a hub will not do)"
        )
    return path


def _read(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"), object_hook=_float)
    except OSError as error:
        raise FusekitError(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise FusekitError(f"{file} is not JSON ({error}): name a config.json of Transformers") from None
    if isinstance(data, dict) and "fusekit_plan" in data:
        raise FusekitError(f"{file} is a saved plan, not a config: give it as --expect {file}")
    if not isinstance(data, dict) or not ({"model_type", "architectures", "auto_map"} & set(data)):
        raise FusekitError(
            f"{file} is no config of a Transformers model: it has neither model_type nor architectures"
        )
    return data


def _float(value: dict[str, Any]) -> Any:
    """Transformers writes what JSON has no number for as {"__float__": "Infinity"}."""
    special = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
    return special.get(value["__float__"], value) if list(value) == ["__float__"] else value


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise FusekitError(
            f"a model is built from a config by Transformers, which cannot be imported ({error}): pip "
            "install 'transformers>=5', or plan a model of your own with fk.plan(model)"
        ) from None
    return transformers


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings and no logging of Transformers; both as before afterwards."""
    root = logging.getLogger("transformers")
    level = root.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        root.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            root.setLevel(level)


# -- classes of Transformers ------------------------------------------------------------------


def _from_transformers(transformers: Any, file: Path, data: dict[str, Any]) -> Built:
    remarks = []
    own_code = "auto_map" in data
    if data.get("quantization_config"):
        remarks.append("the config asks for quantized weights; the model is planned without quantization")
    data = _without_code(data)
    data.pop("quantization_config", None)
    names = [name for name in data.get("architectures") or [] if isinstance(name, str)]
    known = [cls for cls in (_model_class(transformers, name) for name in names) if cls]
    config_class = _config_class(transformers, data.get("model_type"))
    if config_class is None and known and not data.get("model_type"):
        config_class = known[0].config_class
    if config_class is None:
        raise FusekitError(_unknown(transformers, file, data, names, own_code))
    try:
        config = config_class.from_dict(data)
    except Exception as error:
        raise FusekitError(f"{file} does not fit {config_class.__name__}: {_said(error)}") from None
    cls = next((cls for cls in known if cls.config_class is config_class), None)
    if cls is None:
        cls = _auto_class(transformers, config, names)
        if cls is None:
            raise FusekitError(
                f"{file}: Transformers {transformers.__version__} has no model for {config_class.__name__}"
            )
        if names and not own_code:
            remarks.append(
                f"{names[0]} is no class of Transformers {transformers.__version__} for this config; planned "
                f"is {cls.__name__}"
            )
    if own_code:
        remarks.append(
            f"the config brings code of its own, which was not run; planned is {cls.__name__} of Transformers"
        )
    return Built(_built(file, cls, config), tuple(remarks))


def _without_code(value: Any) -> Any:
    """The config without what could make Transformers load code or weights from elsewhere, at any depth."""
    if isinstance(value, list):
        return [_without_code(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, item in value.items():
        if key == "auto_map" or (key == "use_pretrained_backbone" and item):
            continue
        if str(key).strip("_").startswith(KERNELS) and "/" in str(item):
            continue
        kept[key] = _without_code(item)
    return kept


def _model_class(transformers: Any, name: str) -> Any:
    if not name.isidentifier():
        return None
    cls = getattr(transformers, name, None)
    is_model = isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
    return cls if is_model and getattr(cls, "config_class", None) else None


def _config_class(transformers: Any, model_type: Any) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return None
    return CONFIG_MAPPING[model_type]


def _auto_class(transformers: Any, config: Any, names: list[str]) -> Any:
    """What an AutoModel has for a config: that of the task in `architectures`, else the first of `AUTO`."""
    autos = [name for name in dir(transformers) if name.startswith("AutoModelFor")]
    named = [auto for auto in autos if any(name.endswith(auto.removeprefix("AutoModel")) for name in names)]
    for auto in (*named, *AUTO, *autos):
        mapping = getattr(getattr(transformers, auto, None), "_model_mapping", None)
        if mapping is None or type(config) not in mapping:
            continue
        try:
            found = mapping[type(config)]
        except ValueError:  # a name in the table that Transformers does not have
            continue
        cls = found[0] if isinstance(found, tuple) else found
        if getattr(cls, "config_class", None) is type(config):  # else a part of such a model
            return cls
    return None


def _unknown(transformers: Any, file: Path, data: dict[str, Any], names: list[str], own_code: bool) -> str:
    kind = data.get("model_type")
    what = f"the model type {kind!r}" if kind else f"the architectures {names}, and there is no model_type"
    said = f"{file}: Transformers {transformers.__version__} does not know {what}"
    if own_code:
        return (
            f"{said}, and the code that comes with the config is not run: read it, then add "
            "--trust-remote-code if you trust it"
        )
    return f"{said}: upgrade Transformers, or check model_type and architectures"


def _built(file: Path, cls: Any, config: Any) -> nn.Module:
    try:
        with torch.device("meta"):
            model: nn.Module = cls._from_config(config)
    except Exception as error:
        raise FusekitError(f"{cls.__name__} cannot be built from {file}: {_said(error)}") from None
    return model.eval()


def _said(error: Exception) -> str:
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:300]}" if said else type(error).__name__


# -- code of the config's own -----------------------------------------------------------------


def _from_its_code(transformers: Any, file: Path, data: dict[str, Any]) -> Built:
    """The model of a config by the classes that lie beside it: they are imported, so this runs them."""
    names = {key: ref for key, ref in data["auto_map"].items() if isinstance(ref, str)}
    wanted = data.get("architectures") or []
    models = sorted(
        (auto for auto in names if auto.startswith("AutoModel")),
        key=lambda auto: (names[auto].rpartition(".")[2] not in wanted, auto == "AutoModel"),
    )
    if not models:
        return _from_transformers(transformers, file, data)
    try:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        folder = os.fspath(file.parent)
        config_class = _config_class(transformers, data.get("model_type"))
        if "AutoConfig" in names:
            config_class = get_class_from_dynamic_module(names["AutoConfig"], folder, local_files_only=True)
        cls: Any = get_class_from_dynamic_module(names[models[0]], folder, local_files_only=True)
        config_class = config_class or cls.config_class
        config = config_class.from_dict(data)
    except Exception as error:
        raise FusekitError(f"the code that comes with {file} cannot be loaded: {_said(error)}") from None
    if getattr(config, "quantization_config", None):
        del config.quantization_config
    return Built(_built(file, cls, config), ())
