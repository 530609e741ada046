"""Weights in and out of files, together with the settings of their model. Nothing is unpickled but tensors."""

import json
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from hpcai.config import Settings, format_first_error
from hpcai.errors import CheckpointError, ConfigError

Shape = TypeVar("Shape", bound=Settings)
Network = TypeVar("Network", bound=nn.Module)

# What checkpoints of torch, Lightning, DeepSpeed and the MLPerf codes put around weights and before their names. An average of the
# weights comes first.
_AROUND = ("ema", "params", "alphafold_state_dict", "state_dict", "model_state_dict", "module", "model", "best_model_state_dict")
_BEFORE = re.compile(r"^(?:_forward_module\.|averaged_model\.|module\.|model\.|_orig_mod\.)+")


class Portable(nn.Module):
    """A network that goes into a file together with its settings, and comes out of one by the ``load.py`` of its package."""

    cfg: Any
    package: str
    """``__package__`` of the network's module"""

    @property
    def about(self) -> dict[str, str]:
        """What a file of weights says of the network: its kind and settings, and the word for tensors of torch without which some
        libraries refuse it."""
        settings = self.cfg.model_dump(mode="json")
        return {"format": "pt", "hpcai": json.dumps({"model": self.package.rpartition(".")[2], "settings": settings})}

    def files(self, export: Callable[..., None]) -> dict[str, Callable[[Path], Any]]:
        """What a run leaves for people: functions that write a file, by its name. ``export(path)`` writes the weights of the last
        checkpoint (``hpcai.train.saved``)."""
        return {"model.safetensors": export}

    @classmethod
    def load(cls, path: str | Path, cfg: Any = None) -> Self:
        """A model from weights in a file; ``load_weights`` of the model's package says which formats it reads."""
        return import_module(f"{cls.package}.load").load_weights(path, cfg)

    def save(self, path: str | Path, weights: Mapping[str, Tensor] | None = None, form: str = "hpcai") -> None:
        """Weights and settings in one safetensors file, or weights as another code has them: a ``form`` that ``load.py`` of the
        package makes. ``weights`` are by name, in place of the model's own. Raises CheckpointError for a form that is not known, or
        that cannot hold this network."""
        path, state = Path(path), {name: value.detach().cpu() for name, value in (weights or self.state_dict()).items()}
        partial = path.with_name(f".{path.name}.partial")  # renamed when it is whole
        if form == "hpcai":
            _write(partial, self.about, state)
        else:
            try:
                _write_for_others(partial, import_module(f"{self.package}.load"), self.cfg, state, form)
            except CheckpointError as problem:
                raise CheckpointError(f"{path}: {problem}") from problem
        partial.replace(path)


def _write(path: Path, about: dict[str, str], state: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    whole: dict[int, Tensor] = {}
    for value in state.values():
        whole.setdefault(value.data_ptr(), value)  # of weights that modules share, each name has a copy
    alone = {name: value.contiguous() if whole[value.data_ptr()] is value else value.clone() for name, value in state.items()}
    save_file(alone, path, metadata=about)
    path.chmod(0o644)  # safetensors makes a file for its owner only


def _write_for_others(path: Path, others: Any, cfg: Settings, state: Mapping[str, Tensor], form: str) -> None:
    forms = getattr(others, "FORMS", ())
    if form not in forms:
        raise CheckpointError(f"there is no form {form!r} of weights; expected one of {', '.join(('hpcai', *forms))}")
    found = others.in_form(state, cfg, form)
    with path.open("wb") as file:
        if all(isinstance(value, np.ndarray) for value in found.values()):
            np.savez(file, **found)
        else:
            torch.save(found, file)


def read(path: Path, kind: str, settings: type[Shape]) -> tuple[dict[str, Tensor], Shape | None]:
    """Weights by name, and the settings that travelled with them, if any did: from a safetensors file, from arrays of numpy (.npz),
    or from a torch state dict, alone or within a checkpoint. Raises CheckpointError."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file of weights")
    with path.open("rb") as file:
        head = file.read(9)
    try:
        if head[8:] == b"{":
            return _safetensors(path, kind, settings)
        zipped = zipfile.is_zipfile(path)
        if zipped and _is_numpy(path):
            with np.load(path, allow_pickle=False) as arrays:
                return {name: torch.from_numpy(arrays[name]) for name in arrays}, None
        # Mapped, so that a checkpoint's optimizer is not read.
        return _plain(torch.load(path, map_location="cpu", weights_only=True, mmap=zipped), path), None
    except (CheckpointError, ConfigError):
        raise
    except Exception as problem:  # every reader has errors of its own for a damaged file
        if isinstance(problem, pickle.UnpicklingError) or "weights_only" in str(problem):  # such as a TorchScript archive
            why = "damaged, or holds more than tensors and plain values, which is not unpickled; save the state dict alone"
            raise CheckpointError(f"{path}: {why}") from None  # torch's own advice is to run what the file holds
        reason = next(iter(str(problem).splitlines()), type(problem).__name__)
        raise CheckpointError(f"{path}: no safetensors, torch or numpy file of weights, or damaged: {reason}") from problem


def read_settings(path: Path, kind: str, settings: type[Shape]) -> Shape | None:
    """The settings that travelled with the weights of a safetensors file, if any did; no weight is read. Raises CheckpointError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return _told(path, file.metadata(), kind, settings)
    except (OSError, SafetensorError) as problem:
        raise CheckpointError(f"{path}: no safetensors file, or damaged: {problem}") from problem


def _is_numpy(path: Path) -> bool:
    with zipfile.ZipFile(path) as file:
        return all(name.endswith(".npy") for name in file.namelist())


def _safetensors(path: Path, kind: str, settings: type[Shape]) -> tuple[dict[str, Tensor], Shape | None]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 not a dict
        found = _told(path, file.metadata(), kind, settings)
    return (_plain(state, path), None) if found is None else (state, found)


def _told(path: Path, metadata: Mapping[str, str] | None, kind: str, settings: type[Shape]) -> Shape | None:
    about = json.loads((metadata or {}).get("hpcai", "{}"))
    if not about:
        return None
    if about.get("model") != kind:
        raise CheckpointError(f"{path}: holds a model of kind {about.get('model')!r}; expected {kind!r}")
    try:
        return settings.model_validate_json(json.dumps(about["settings"]))
    except ValidationError as problem:
        raise ConfigError(f"{path}: settings inside the file: {format_first_error(problem)}") from problem


def _plain(found: Any, path: Path) -> dict[str, Tensor]:
    """The weights alone, without what is around them and before their names."""
    while isinstance(found, Mapping) and (inner := next((k for k in _AROUND if isinstance(found.get(k), Mapping)), None)):
        found = found[inner]
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise CheckpointError(f"{path}: expected names with tensors, alone or under one of {', '.join(_AROUND)}")
    state = {_BEFORE.sub("", name): value for name, value in found.items()}
    if len(state) != len(found):
        raise CheckpointError(f"{path}: several tensors of one name, but for what is before it; save one state dict alone")
    state.pop("n_averaged", None)  # a count, which torch keeps beside its averages
    return state


# ---- from weights to a network


@contextmanager
def names_known(path: Path, state: Mapping[str, Tensor], expected: str) -> Iterator[None]:
    """Inside, the sizes of a network are read off its weights. Raises CheckpointError where one is missing or of other dims."""
    try:
        yield
    except (LookupError, TypeError, ValueError, ZeroDivisionError) as problem:
        known = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in list(state.items())[:6])
        what = f"no tensor {problem}" if isinstance(problem, KeyError) else f"tensors of other shapes ({problem})"
        raise CheckpointError(f"{path}: {what}; expected the names {expected}, found {known}") from problem


def agree(path: Path, sizes: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Raises CheckpointError where the sizes of weights are not those that settings ask for."""
    for name, size in sizes.items():
        if asked[name] != size:
            raise CheckpointError(f"{path}: the weights have {name} {size}, the settings {asked[name]}; load without settings")


def filled(model: Network, state: Mapping[str, Tensor], path: Path) -> Network:
    """``model`` with these weights, in evaluation mode. Raises CheckpointError where they do not fit."""
    try:
        model.load_state_dict(state)
    except RuntimeError as problem:
        raise CheckpointError(f"{path}: not the weights of a {type(model).__name__}: {problem}") from problem
    taken_from(model, path)
    return model.eval()


def taken_from(model: nn.Module, path: Path) -> None:
    """Record that all parameters are those of a file (``parameter.origin``). A checkpoint names the file in place of those that are
    frozen; who changes such a parameter removes its ``origin``."""
    for parameter in model.parameters():
        parameter.origin = str(path.resolve())  # type: ignore[attr-defined]
