"""Weights in and out of files, together with the settings of their model. Nothing is unpickled but tensors."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from hpcai.config import Settings
from hpcai.errors import CheckpointError, ConfigError

Shape = TypeVar("Shape", bound=Settings)


def write(path: str | Path, kind: str, cfg: Settings, weights: Mapping[str, Tensor]) -> None:
    """Write one safetensors file, beside its place and then renamed; ``kind`` names the model that ``cfg`` describes."""
    from safetensors.torch import save_file

    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    settings = json.dumps({"model": kind, "settings": cfg.model_dump(mode="json")})
    save_file({name: t.detach().cpu().contiguous() for name, t in weights.items()}, partial, metadata={"hpcai": settings})
    partial.chmod(0o644)  # safetensors makes a file for its owner only
    partial.replace(path)


def read(
    path: Path, kind: str, settings: type[Shape], under: Sequence[str] = (),
) -> tuple[dict[str, Tensor], Shape | None]:  # fmt: skip
    """Weights by name, and the settings that travelled with them, from a safetensors file or a torch state dict. The latter may
    stand under ``state_dict``, ``model_state_dict``, ``model`` or one of ``under``, and have ``module.`` before its names. Raises
    CheckpointError.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file of weights")
    with path.open("rb") as file:
        head = file.read(9)
    try:
        if head[8:9] == b"{":
            return _safetensors(path, kind, settings)
        return _plain(torch.load(path, map_location="cpu", weights_only=True), under), None
    except (CheckpointError, ConfigError):
        raise
    except Exception as problem:  # every reader has errors of its own for a damaged file
        reason = next(iter(str(problem).splitlines()), type(problem).__name__)
        raise CheckpointError(f"{path}: not a safetensors file or torch state dict, or damaged: {reason}") from problem


def _safetensors(path: Path, kind: str, settings: type[Shape]) -> tuple[dict[str, Tensor], Shape | None]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 not a dict
        about = json.loads((file.metadata() or {}).get("hpcai", "{}"))
    if not about:
        return _plain(state), None
    if about.get("model") != kind:
        raise CheckpointError(f"{path}: holds a model of kind {about.get('model')!r}; expected {kind!r}")
    try:
        return state, settings.model_validate_json(json.dumps(about["settings"]))
    except ValueError as problem:
        raise ConfigError(f"{path}: settings inside the file: {problem}") from problem


def _plain(found: Any, under: Sequence[str] = ()) -> dict[str, Tensor]:
    for key in ("state_dict", "model_state_dict", "model", *under):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise CheckpointError("expected a mapping of names to tensors")
    return {name.removeprefix("module."): value for name, value in found.items()}
