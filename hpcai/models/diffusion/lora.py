"""Low-rank adapters of denoising networks (``hpcai.parallel.lora``), and their files, of diffusers and of kohya's scripts.

    adapt(model, DiffusionLoRAConfig(rank=16, alpha=16))     # after ``parallelize``; only A and B are trained
    save_adapter(model, folder)                              # for load_lora_weights of diffusers
    merge(model)                                             # replaces W by W + s B A: a model without adapters
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hpcai.arrays import warn
from hpcai.errors import CheckpointError, ConfigError
from hpcai.json_file import check_fields, parse_object
from hpcai.models.diffusion.config import DiffusionLoRAConfig
from hpcai.models.diffusion.load import TABLES
from hpcai.models.diffusion.model import Diffusion
from hpcai.nn.safetensors_files import open_tensors, read_full, read_metadata, save_sharded
from hpcai.parallel import lora
from hpcai.parallel.lora import merge as merge
from hpcai.parallel.sharding import shard_spec
from hpcai.settings import longest_end

_FILE, _METADATA = "pytorch_lora_weights.safetensors", "lora_adapter_metadata"
_KEY = re.compile(r"(?:(?:unet|transformer)\.|lora_unet_)?(.+)\.(?:(lora_A|lora[._]down)|(lora_B|lora[._]up)|alpha)(?:\.weight)?")
_LDM = re.compile(r"(down|mid|up)_blocks?\.(?:(\d+)\.)?(resnets|attentions)\.(\d+)\.(.+)")
_TEXT = re.compile(r"text_encoder(_\d)?\.|lora_te\d?_")


def adapt(model: Diffusion, cfg: DiffusionLoRAConfig) -> Diffusion:
    """Add adapters to the layers of ``cfg.targets``, as ``hpcai.parallel.lora.adapt``."""
    if cfg.modules_to_save:
        raise ConfigError(f"modules_to_save has {cfg.modules_to_save[0]}; files of diffusers hold adapters alone: leave it out")
    if cfg.targets == DiffusionLoRAConfig().targets:
        targets = sorted({longest_end(name, cfg.targets) for name in _linear_sizes(model)} - {""})
        cfg = cfg.model_copy(update={"targets": tuple(targets) or cfg.targets})
    return lora.adapt(model, cfg)


def save_adapter(model: Diffusion, folder: str | Path) -> None:
    """Write the adapters of an unsharded model as pytorch_lora_weights.safetensors, with the settings of peft."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    _save(model, dict(model.named_parameters()), Path(folder) / _FILE)


def files(model: Diffusion, export: Callable[..., None]) -> dict[str, Callable[[Path], Any]]:
    """Return the file of a run and its writer: the adapters, as ``save_adapter`` writes them."""
    from safetensors.torch import load_file

    def write(path: Path) -> None:
        export(path, names=lambda name: name if ".adapter." in name else None)
        _save(model, load_file(path), path)

    return {f"adapter/{_FILE}": write}


def _save(model: Diffusion, state: Mapping[str, Tensor], path: Path) -> None:
    prefix, cfg = _prefix(model), model.adapters
    tensors = {name.replace("network.", prefix, 1).replace(".adapter.", "."): x for name, x in state.items() if ".adapter." in name}
    settings = {key: getattr(cfg, name) for name, key in TABLES["peft keys"].items()}
    settings["target_modules"] = [name for name in _linear_sizes(model) if cfg.for_layer(name)]
    metadata = json.dumps({f"{prefix}{key}": value for key, value in settings.items()})
    save_sharded(tensors, path.parent, path.name, 1 << 62, {_METADATA: metadata})


def load_adapter(model: Diffusion, path: str | Path) -> DiffusionLoRAConfig:
    """Add the adapters in a file, or in pytorch_lora_weights.safetensors of a folder, to ``model``, and return their settings. Logs
    a warning for those of text encoders, which are left out. Raises CheckpointError or ConfigError for adapters of another network
    or type, or damaged ones; the model is then unchanged."""
    path = Path(path) / _FILE if Path(path).is_dir() else Path(path)
    sizes, tensors, parts = _linear_sizes(model), open_tensors(path), dict[str, dict[str, Tensor]]()
    modules, layers, state = _names_in_files(model, sizes), dict[str, tuple[int, float]](), dict[str, Tensor]()
    if text := [key for key in tensors if _TEXT.match(key)]:
        warn("%s: %d tensors of text encoders (%s) are left out; encode captions with them merged", path, len(text), text[0])
    for key in tensors.keys() - {*text}:
        if (match := _KEY.fullmatch(key)) is None or match[1] not in modules:
            problem = f"{key} is of no linear layer of the network, or of no plain LoRA"
            raise CheckpointError(f"{path}: {problem}; is it of this network? If so, merge it by the code that wrote it")
        parts.setdefault(match[1], {})["A" if match[2] else "B" if match[3] else "alpha"] = read_full(tensors[key])
    cfg = _read_settings(path, _prefix(model))
    for theirs, part in sorted(parts.items()):
        names, rows = modules[theirs], [sizes[name][0] for name in modules[theirs]]
        down, up = (part[kind].flatten(1) if kind in part else Tensor() for kind in "AB")
        shapes, expected = [list(down.shape), list(up.shape)], [[len(down), sizes[names[0]][1]], [sum(rows), len(down)]]
        if shapes != expected or not (down.is_floating_point() and up.is_floating_point()):
            raise CheckpointError(f"{path}: {theirs} has {shapes}, expected {expected} of floating-point; is it of this network?")
        if "adaLN" in theirs and rows[0] == 2 * down.shape[1]:  # of shift and scale, which are scale and shift in diffusers
            up = up.roll(down.shape[1], 0)
        for name, piece in zip(names, up.split(rows)):
            alpha = cfg.alpha_pattern.get(longest_end(name, cfg.alpha_pattern), cfg.alpha) if cfg else len(down)
            layers[name] = len(down), float(part.get("alpha", alpha))
            state |= {f"network.{name}.adapter.lora_A.weight": down, f"network.{name}.adapter.lora_B.weight": piece}
    if not layers:
        raise CheckpointError(f"{path}: holds no adapter of a network; expected {_prefix(model)}{next(iter(sizes))}.lora_A.weight")
    adapt(model, cfg := lora.with_layers(cfg or DiffusionLoRAConfig(), layers, sizes))
    lora.load_tensors(model, state)
    return cfg


def _read_settings(path: Path, prefix: str) -> DiffusionLoRAConfig | None:
    """Return the settings in a file of diffusers, or None."""
    where, expected, keys = f"{path}: {_METADATA}", "settings of peft", TABLES["peft keys"]
    content = parse_object(read_metadata(path).get(_METADATA, "{}"), where, expected)
    config = {key.removeprefix(prefix): value for key, value in content.items()}
    with check_fields(where, expected, keys=keys):
        values = {name: config[key] for name, key in keys.items() if config.get(key) is not None}
        patterns = {key: {name.lstrip("^"): x for name, x in values[key].items()} for key in values if key.endswith("pattern")}
        return DiffusionLoRAConfig(**values | patterns) if values else None


def _prefix(model: Diffusion) -> str:
    return "unet." if model.cfg.unet is not None else "transformer."


def _linear_sizes(model: Diffusion) -> dict[str, tuple[int, ...]]:
    layers = ((name, x) for name, x in model.network.named_modules() if isinstance(x, nn.Linear) and ".adapter." not in name)
    return {name: shard_spec(layer.weight).global_shape for name, layer in layers}


def _names_in_files(model: Diffusion, sizes: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the linear layers of each name in files: of diffusers, of kohya's, and of the networks' own code, where several of a
    transformer are one."""
    names: dict[str, tuple[str, ...]] = {form: (name,) for name in sizes for form in (name, name.replace(".", "_"))}
    if model.cfg.unet is not None:
        return names | {_in_ldm(name, model.cfg.unet.blocks): (name,) for name in sizes}
    numbers = {number for name in sizes for number in name.split(".")[1:2]}
    joined = ((theirs.format(n), tuple(x.format(n) for x in own)) for theirs, own in TABLES["own names"].items() for n in numbers)
    return names | {theirs: ours for theirs, ours in joined if ours[0] in sizes}


def _in_ldm(name: str, blocks: int) -> str:
    """Return the name of a layer of a U-Net with ``blocks`` in a level of the encoder in the code of latent diffusion."""
    if (match := _LDM.fullmatch(name)) is None:
        return name
    where, level, kind, number, rest = match.groups()
    is_attention, place = kind == "attentions", (blocks + 1) * int(level or 0) + int(number)
    prefix = f"input_blocks_{place + 1}_{is_attention:d}" if where == "down" else f"output_blocks_{place}_{is_attention:d}"
    prefix = f"middle_block_{1 if is_attention else 2 * place}" if where == "mid" else prefix
    return f"{prefix}_{rest}".replace(".", "_").replace("time_emb_proj", "emb_layers_1")
