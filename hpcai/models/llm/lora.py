"""Low-rank adapters of a language model (Hu et al., "LoRA", 2021): y = W x + s B A x, where W stays as it is.

    adapt(model, LoRAConfig(rank=16, alpha=32))     # after ``parallelize``; A and B are all that is trained
    save_adapter(model, folder)                     # as peft reads it
    merge(model)                                    # W + s B A in place of W: an ordinary model
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpcai.errors import CheckpointError, ConfigError
from hpcai.models.llm.config import LoRAConfig
from hpcai.models.llm.model import LLM
from hpcai.nn.quantized import QuantizedLinear
from hpcai.nn.safetensors_files import open_tensors
from hpcai.parallel.data_parallel import sum_gradients_over
from hpcai.parallel.sharding import ALONE, shard_spec, sum_axes
from hpcai.parallel.tensor import ColumnParallelLinear, RowParallelLinear, column_parallel, dequantize, quantize, row_parallel

_FILE, _CONFIG, _PREFIX = "adapter_model.safetensors", "adapter_config.json", "base_model.model."


class Adapter(nn.Module):
    """s B A of the layer that it belongs to, to whose output it is added; cut as that layer is."""

    float8 = False  # its products are too small to gain from it

    def __init__(self, linear: nn.Linear, cfg: LoRAConfig) -> None:
        super().__init__()
        device = None if linear.weight.device.type == "meta" else linear.weight.device  # in ``deferred`` they are drawn later, too
        like: dict[str, Any] = {"device": device, "dtype": linear.weight.dtype, "bias": False}
        place, summed = shard_spec(linear.weight), sum_axes(linear.weight)
        outputs, inputs = place.global_shape
        self.lora_A, self.lora_B = nn.Linear(inputs, cfg.rank, **like), nn.Linear(cfg.rank, outputs, **like)
        self.drop, self.scale = nn.Dropout(cfg.dropout), cfg.scale
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)
        for axis in summed:
            sum_gradients_over(self, axis if not axis.parent else ALONE)  # those of a part of an axis come with the cut
        if isinstance(linear, ColumnParallelLinear):
            over, groups = place.axes[0] if place.axes else ALONE, None
            if over.parent or over is ALONE:  # some ranks, or all, have the same outputs
                same = (axis for axis in summed if axis.parent == over.parent and (axis.parent or axis.name) == linear.axis.name)
                groups = over, next(same)
            column_parallel(self.lora_B, linear.axis, sequence=linear.sequence, groups=groups)
        elif isinstance(linear, RowParallelLinear):
            row_parallel(self.lora_A, linear.axis, linear.sequence)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.lora_B(self.lora_A(self.drop(x)))

    @property
    def delta_weight(self) -> Tensor:
        """What it adds to the weight of its layer, of the part that is here.   [C', C]"""
        wide = torch.promote_types(self.lora_A.weight.dtype, torch.float32)
        return self.scale * (self.lora_B.weight.detach().to(wide) @ self.lora_A.weight.detach().to(wide))


def adapt(model: LLM, cfg: LoRAConfig) -> LLM:
    """``model``, in place, whose layers named in ``cfg.targets`` have adapters; nothing else is trained any more, and lies in
    memory as ``cfg.frozen`` says. All ranks of a cut model call this together. Raises ConfigError for a target that no layer is
    called, and for a model that has adapters."""
    if any(True for _ in _adapted_layers(model)):
        raise ConfigError("the model has adapters; merge them before it gets others")
    linears = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear) and part is not model.lm_head}
    for target in cfg.targets:
        if not any(name.rpartition(".")[2] == target for name in linears):
            known = sorted({name.rpartition(".")[2] for name in linears})
            raise ConfigError(f"adapters of {target}, but no layer is called so; expected some of {', '.join(known)}")
    model.requires_grad_(False)
    for name, linear in linears.items():
        if name.rpartition(".")[2] in cfg.targets:
            linear.adapter = Adapter(linear, cfg).train(model.training)
            linear.register_forward_hook(_add_adapter)
        if cfg.frozen != "as they are":
            quantize(linear, cfg.frozen)
    model.adapters = cfg
    return model


def merge(model: LLM) -> LLM:
    """Add the adapters to the weights that they belong to, and take them away: an ordinary model, all of it to be trained.

    Frozen weights that were rounded to fewer bits become wide again, and stay the rounded ones: those that adapters were trained
    beside. ``load_adapter`` adds them to others.
    """
    dtypes = {adapter.lora_A.weight.dtype for _, _, adapter in _adapted_layers(model)}
    for part in model.modules():
        if isinstance(part, QuantizedLinear):
            dequantize(part, *dtypes)
    for _, linear, adapter in list(_adapted_layers(model)):
        with torch.no_grad():
            linear.weight.copy_(linear.weight.to(adapter.delta_weight.dtype) + adapter.delta_weight)
        linear._forward_hooks = type(linear._forward_hooks)(
            (number, hook) for number, hook in linear._forward_hooks.items() if hook is not _add_adapter
        )
        del linear.adapter
    model.adapters = None
    return model.requires_grad_(True)


def save_adapter(model: LLM, cfg: LoRAConfig, folder: str | Path, base: str = "") -> None:
    """The adapters alone, whole, in the folder and under the names that peft has. ``base``: where the rest of the model is."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    found = {_peft_name(name): tensor.detach().cpu().contiguous() for name, tensor in _adapter_parameters(model).items()}
    save_file(found, folder / _FILE, metadata={"format": "pt"})
    (folder / _FILE).chmod(0o644)
    (folder / _CONFIG).write_text(json.dumps(_peft_config(cfg, base), indent=2) + "\n")


def _peft_config(cfg: LoRAConfig, base: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": cfg.rank, "lora_alpha": cfg.alpha,
        "lora_dropout": cfg.dropout, "use_rslora": cfg.stabilised, "target_modules": sorted(cfg.targets), "bias": "none",
        "fan_in_fan_out": False, "inference_mode": True, "modules_to_save": None,
    }  # fmt: skip


def files(model: LLM, export: Callable[..., None]) -> dict[str, Callable[[Path], Any]]:
    """What a run leaves: the adapters alone, in a folder as ``save_adapter`` writes it."""
    origin = next((o for p in model.parameters() if (o := getattr(p, "origin", None))), "")
    about = json.dumps(_peft_config(model.adapters, str(Path(origin).parent) if origin else ""), indent=2) + "\n"

    def write(path: Path) -> None:
        export(path, names=lambda name: _peft_name(name) if ".adapter.lora_" in name else None)

    return {f"adapter/{_FILE}": write, f"adapter/{_CONFIG}": lambda path: path.write_text(about)}


def load_adapter(model: LLM, folder: str | Path) -> LoRAConfig:
    """Give ``model`` the adapters of a folder that peft or ``save_adapter`` wrote -> their settings. Raises
    CheckpointError for adapters of another model or kind, or that are damaged; the model then is as it was."""
    folder = Path(folder)
    cfg = read_adapter_config(folder)
    there = open_tensors(folder / _FILE)
    names = [name for name, part in model.named_modules() if isinstance(part, nn.Linear) and name.rpartition(".")[2] in cfg.targets]
    wanted = {_peft_name(f"{name}.adapter.{half}.weight") for name in names for half in ("lora_A", "lora_B")}
    if wrong := sorted(wanted ^ set(there)) or ([] if wanted else ["no adapter of a layer that is here"]):
        what = "is there for no layer of the model" if wrong[0] in there else "is missing"
        raise CheckpointError(f"{folder}: {wrong[0]} {what}; is it an adapter of this model?")
    for name in names:
        outputs, inputs = shard_spec(model.get_parameter(f"{name}.weight")).global_shape
        for half, size in (("lora_A", (cfg.rank, inputs)), ("lora_B", (outputs, cfg.rank))):
            key = _peft_name(f"{name}.adapter.{half}.weight")
            if there[key].size != size:
                raise CheckpointError(f"{folder}: {key} is {list(there[key].size)}, expected {list(size)}; it is of another model")
    adapt(model, cfg)
    for name, parameter in _adapter_parameters(model).items():
        source = there[_peft_name(name)]
        with torch.no_grad():
            for offsets, box in shard_spec(parameter).boxes((0, 0), tuple(parameter.shape)):
                sizes = parameter[box].shape
                parameter[box] = source[tuple(slice(a, a + n) for a, n in zip(offsets, sizes))].to(parameter)
    return cfg


def read_adapter_config(folder: Path) -> LoRAConfig:
    path = folder / _CONFIG
    try:
        found: Mapping[str, Any] = json.loads(path.read_text())
        kind = found["peft_type"]
    except (OSError, ValueError, LookupError, TypeError) as problem:
        raise CheckpointError(f"{path}: no settings of an adapter: {problem!r}; expected JSON with a peft_type") from problem
    odd = [name for name in ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out") if found.get(name)]
    if kind != "LORA" or odd or found.get("bias", "none") != "none":
        what = f"an adapter of kind {kind!r}" if kind != "LORA" else f"{odd[0] if odd else 'bias'} is set"
        raise CheckpointError(f"{path}: {what}; expected a plain LORA")
    try:
        return LoRAConfig(
            rank=found["r"], alpha=found["lora_alpha"], dropout=found.get("lora_dropout") or 0.0,
            stabilised=bool(found.get("use_rslora")), targets=tuple(sorted(found["target_modules"])),
        )  # fmt: skip
    except (LookupError, TypeError, ValueError) as problem:
        raise CheckpointError(f"{path}: {problem!r}") from problem


def _add_adapter(linear: nn.Module, given: tuple[Any, ...], output: Tensor) -> Tensor:
    adapter: Any = linear.adapter
    return output + adapter(given[0])


def _adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any, Adapter]]:
    for name, part in model.named_modules():
        if isinstance(getattr(part, "adapter", None), Adapter):
            yield name, part, part.adapter


def _adapter_parameters(model: LLM) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if ".adapter.lora_" in name}


def _peft_name(name: str) -> str:
    return _PREFIX + name.replace(".adapter.", ".")
