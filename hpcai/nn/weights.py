"""Files of weights with the settings of their model. Only tensors are unpickled."""

import json
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from hpcai.config import Settings
from hpcai.errors import CheckpointError, ConfigError
from hpcai.json_file import check_fields, parse_object
from hpcai.nn.safetensors_files import read_metadata
from hpcai.schema import Schema, format_value

SettingsT = TypeVar("SettingsT", bound=Settings)
ModelT = TypeVar("ModelT", bound=nn.Module)

# Keys of state dicts in checkpoints of torch, Lightning, DeepSpeed and the MLPerf codes, averages first; prefixes of their keys.
_CONTAINERS = "ema", "params", "alphafold_state_dict", "state_dict", "model_state_dict", "module", "model", "best_model_state_dict"
_PREFIXES = re.compile(r"^(?:_forward_module\.|averaged_model\.|module\.|model\.|_orig_mod\.)+")


class PretrainedMixin(nn.Module):
    """A network that is saved to a file with its settings, and loaded by the ``load.py`` of its package."""

    cfg: Any
    package: str
    """``__package__`` of the network's module"""
    adapters: Any = None
    """settings of its adapters (``lora.py`` of the package), if any"""

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of a file of weights: kind and settings of the network, and ``format``, which some libraries require."""
        settings = self.cfg.model_dump(mode="json")
        return {"format": "pt", "hpcai": json.dumps({"model": self.package.rpartition(".")[2], "settings": settings})}

    def output_files(self, export: Callable[..., None]) -> dict[str, Callable[[Path], Any]]:
        """Return the functions that write the files at the end of a run, by file name. ``export(path)`` writes the weights of the
        last checkpoint (``hpcai.train.checkpoint_reader``)."""
        if self.adapters is not None:
            return dict(import_module(f"{self.package}.lora").files(self, export))
        return {"model.safetensors": export}

    @classmethod
    def load(cls, path: str | Path, cfg: Any = None) -> Self:
        """Load a model from a file of weights, in a format that ``load_weights`` of the model's package documents."""
        return import_module(f"{cls.package}.load").load_weights(path, cfg)

    def save(self, path: str | Path, weights: Mapping[str, Tensor] | None = None, form: str = "hpcai") -> None:
        """Save weights and settings as one safetensors file, or weights in the format of another code: a ``form`` of ``FORMS`` in
        ``load.py`` of the package, by its ``in_form`` if names differ. ``weights``: Weights by name, instead of those of the model.
        Raises CheckpointError for a form that is unknown, or that cannot represent this network."""
        path, state = Path(path), {name: value.detach().cpu() for name, value in (weights or self.state_dict()).items()}
        partial = path.with_name(f".{path.name}.partial")  # renamed when it is complete
        if form == "hpcai":
            _write(partial, self.metadata, state)
        else:
            package = import_module(f"{self.package}.load")
            if form not in (forms := getattr(package, "FORMS", ())):
                expected = ", ".join(("hpcai", *forms))
                raise CheckpointError(f"{path}: there is no form {form!r} of weights; expected one of {expected}")
            try:
                converted = package.in_form(state, self.cfg, form) if hasattr(package, "in_form") else dict(state)
            except CheckpointError as error:
                raise CheckpointError(f"{path}: {error}") from error
            with partial.open("wb") as file:
                if all(isinstance(value, np.ndarray) for value in converted.values()):
                    np.savez(file, **converted)
                else:
                    torch.save(converted, file)
        partial.replace(path)


def _write(path: Path, metadata: dict[str, str], state: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    owners: dict[int, Tensor] = {}
    for value in state.values():
        owners.setdefault(value.data_ptr(), value)  # safetensors has no shared weights: each name gets a copy
    copies = {name: value.contiguous() if owners[value.data_ptr()] is value else value.clone() for name, value in state.items()}
    save_file(copies, path, metadata=metadata)
    path.chmod(0o644)  # safetensors makes files that only their owner can read


def load_state(path: Path, kind: str, settings: type[SettingsT]) -> tuple[dict[str, Tensor], SettingsT | None]:
    """Load weights by name, and the settings in the file, or None: from a safetensors file, from NumPy arrays (.npz), or from a
    torch state dict, alone or in a checkpoint. Raises CheckpointError."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file of weights")
    with path.open("rb") as stream:
        magic = stream.read(9)
    try:
        if magic[8:] == b"{":
            from safetensors import safe_open

            with safe_open(path, framework="pt") as file:
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                cfg = _embedded_settings(path, file.metadata(), kind, settings)
            if cfg is None:
                return _unwrap(state, path), None
            check_claims(path, cfg, {name: tensor.shape for name, tensor in state.items()})
            return state, cfg
        is_zip = zipfile.is_zipfile(path)
        if is_zip and _is_numpy(path):
            with np.load(path, allow_pickle=False) as arrays:
                return {name: torch.from_numpy(arrays[name]) for name in arrays}, None
        # Memory-mapped, so that the optimizer state of a checkpoint is not read.
        return _unwrap(torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip), path), None
    except (CheckpointError, ConfigError):
        raise
    except Exception as error:  # each reader has its own exceptions for a damaged file
        if isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):  # such as a TorchScript archive
            reason = "damaged, or holds more than tensors and plain values, which is not unpickled; save the state dict alone"
            raise CheckpointError(f"{path}: {reason}") from None  # torch's message recommends running the code of the file
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(f"{path}: no safetensors, torch or numpy file of weights, or damaged: {reason}") from error


def read_settings(path: Path, kind: str, settings: type[SettingsT]) -> SettingsT | None:
    """Read the settings in a safetensors file, or None, and no weight. Raises CheckpointError."""
    return _embedded_settings(path, read_metadata(path), kind, settings)


def _is_numpy(path: Path) -> bool:
    with zipfile.ZipFile(path) as file:
        return all(name.endswith(".npy") for name in file.namelist())


def _embedded_settings(path: Path, metadata: Mapping[str, str] | None, kind: str, settings: type[SettingsT]) -> SettingsT | None:
    if "hpcai" not in (metadata or {}):
        return None
    where = f"{path}: settings inside the file"
    content = parse_object((metadata or {})["hpcai"], where, "those of hpcai")
    if content.get("model") != kind:
        raise CheckpointError(f"{path}: holds a model of kind {content.get('model')!r}; expected {kind!r}")
    with check_fields(where, "a section of settings"):
        list(Schema(settings).apply_renames(content["settings"]))
        return settings.model_validate_json(json.dumps(content["settings"]))


def _unwrap(content: Any, path: Path) -> dict[str, Tensor]:
    """Return the state dict in a checkpoint, without prefixes of its keys."""
    while isinstance(content, Mapping) and (key := next((k for k in _CONTAINERS if isinstance(content.get(k), Mapping)), None)):
        content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{path}: expected names with tensors, alone or under one of {', '.join(_CONTAINERS)}")
    state = {_PREFIXES.sub("", name): value for name, value in content.items()}
    if len(state) != len(content):
        raise CheckpointError(f"{path}: several tensors of one name, apart from its prefix; save one state dict alone")
    state.pop("n_averaged", None)  # a counter of torch's AveragedModel
    return state


# ---- loading into a network


@contextmanager
def check_names(path: Path, state: Mapping[str, Tensor], expected: str) -> Iterator[None]:
    """Context manager for code that derives the sizes of a network from its weights. Raises CheckpointError if that code fails, as
    a weight is missing or has other dims."""
    try:
        yield
    except (LookupError, TypeError, ValueError, ZeroDivisionError) as error:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in list(state.items())[:6])
        reason = f"no tensor {error}" if isinstance(error, KeyError) else f"tensors of other shapes ({error})"
        raise CheckpointError(f"{path}: {reason}; expected the names {expected}, found {shapes}") from error


def check_claims(path: Path, cfg: Settings, shapes: Mapping[str, Sequence[int]], keys: Mapping[str, str] | None = None) -> None:
    """Raise CheckpointError, before a network is built, if settings have more layers than the weights have tensors, or larger sizes
    than these. ``keys``: Names of the settings in ``path``, if they are other names."""
    largest = max((1 << 24, *(size for shape in shapes.values() for size in shape)))
    counts = {"layers", "mtp_layers", "blocks", "middle", "double", "transformer_layers"}
    for name in type(cfg).model_fields:
        if isinstance(value := getattr(cfg, name), Settings):
            check_claims(path, value, shapes, keys)
        numbers = [number for number in (value if isinstance(value, tuple) else (value,)) if isinstance(number, int)]
        limit = len(shapes) if name in counts or (name == "single" and hasattr(cfg, "double")) else largest
        if len(numbers) > len(shapes) or max(numbers, default=0) > limit:
            claim, actual = f"{(keys or {}).get(name, name)} is {format_value(value)}", f"{len(shapes)} tensors with dims up to"
            raise CheckpointError(f"{path}: {claim}; the weights have {actual} {largest:,}: fetch or save both again")


def check_sizes(path: Path, sizes: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the sizes of weights differ from those of the settings."""
    for name, size in sizes.items():
        if expected[name] != size:
            raise CheckpointError(f"{path}: the weights have {name} {size}, the settings {expected[name]}; load without settings")


def load_into(model: ModelT, state: Mapping[str, Tensor], path: Path) -> ModelT:
    """Load weights into ``model``, and return it in evaluation mode. Raises CheckpointError if they do not fit."""
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(f"{path}: not the weights of a {type(model).__name__}: {error}") from error
    set_origin(model, path)
    return model.eval()


def set_origin(model: nn.Module, path: Path) -> None:
    """Set ``origin`` of all parameters to the file of their weights. A checkpoint stores it instead of frozen parameters; code that
    changes a parameter must delete it."""
    for parameter in model.parameters():
        parameter.origin = str(path.resolve())  # type: ignore[attr-defined]
