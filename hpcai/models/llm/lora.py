"""Low-rank adapters of a language model (Hu et al., "LoRA", 2021): y = W x + s B A x with frozen W.

    adapt(model, LoRAConfig(rank=16, alpha=32))     # after ``parallelize``; only A and B are trained
    save_adapter(model, folder)                     # in the format of peft
    merge(model)                                    # replaces W by W + s B A: a model without adapters
"""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpcai.errors import CheckpointError, ConfigError
from hpcai.json_file import check_fields, read_object
from hpcai.models.llm.config import LoRAConfig
from hpcai.models.llm.model import LLM
from hpcai.nn.quantized import QuantizedLinear
from hpcai.nn.safetensors_files import open_tensors
from hpcai.parallel.data_parallel import sum_gradients_over
from hpcai.parallel.sharding import ALONE, shard_spec, sum_axes
from hpcai.parallel.tensor import ColumnParallelLinear, RowParallelLinear, column_parallel, dequantize, quantize, row_parallel

_FILE, _CONFIG, _PREFIX = "adapter_model.safetensors", "adapter_config.json", "base_model.model."


class Adapter(nn.Module):
    """The adapter s B A of a linear layer, added to its output, and sharded like the layer."""

    float8 = False  # matrices too small to gain from FP8

    def __init__(self, linear: nn.Linear, cfg: LoRAConfig) -> None:
        super().__init__()
        device = None if linear.weight.device.type == "meta" else linear.weight.device  # ``deferred`` draws them later, too
        kwargs: dict[str, Any] = {"device": device, "dtype": linear.weight.dtype, "bias": False}
        spec, reduced = shard_spec(linear.weight), sum_axes(linear.weight)
        outputs, inputs = spec.global_shape
        self.lora_A, self.lora_B = nn.Linear(inputs, cfg.rank, **kwargs), nn.Linear(cfg.rank, outputs, **kwargs)
        self.drop, self.scale = nn.Dropout(cfg.dropout), cfg.scale
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)
        for axis in reduced:
            sum_gradients_over(self, axis if not axis.parent else ALONE)  # subaxes are set when the layers are sharded
        if isinstance(linear, ColumnParallelLinear):
            over, groups = spec.axes[0] if spec.axes else ALONE, None
            if over.parent or over is ALONE:  # some ranks, or all, have the same outputs
                same = (axis for axis in reduced if axis.parent == over.parent and (axis.parent or axis.name) == linear.axis.name)
                groups = over, next(same)
            column_parallel(self.lora_B, linear.axis, sequence=linear.sequence, groups=groups)
        elif isinstance(linear, RowParallelLinear):
            row_parallel(self.lora_A, linear.axis, linear.sequence)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.lora_B(self.lora_A(self.drop(x)))

    @property
    def delta_weight(self) -> Tensor:
        """s B A, the local shard.   [C', C]"""
        wide = torch.promote_types(self.lora_A.weight.dtype, torch.float32)
        return self.scale * (self.lora_B.weight.detach().to(wide) @ self.lora_A.weight.detach().to(wide))


def adapt(model: LLM, cfg: LoRAConfig) -> LLM:
    """Add adapters to the layers named in ``cfg.targets``, in place, and freeze all other weights, in ``cfg.base_dtype``.
    Collective over all ranks of a sharded model. Raises ConfigError for a target that names no layer, and if the model already has
    adapters."""
    if any(True for _ in _adapted_layers(model)):
        raise ConfigError("the model has adapters; merge them before it gets others")
    linears = {name: x for name, x in model.named_modules() if isinstance(x, nn.Linear) and x is not model.lm_head}
    for target in cfg.targets:
        if not any(name.rpartition(".")[2] == target for name in linears):
            known = sorted({name.rpartition(".")[2] for name in linears})
            raise ConfigError(f"adapters of {target}, but no layer has this name; expected some of {', '.join(known)}")
    model.requires_grad_(False)
    for name, linear in linears.items():
        if name.rpartition(".")[2] in cfg.targets:
            linear.adapter = Adapter(linear, cfg).train(model.training)
            linear.register_forward_hook(_add_adapter)
        if cfg.base_dtype != "as they are":
            quantize(linear, cfg.base_dtype)
    model.adapters = cfg
    return model


def merge(model: LLM) -> LLM:
    """Add the adapters to their weights and remove them; all parameters of the result require gradients.

    Quantized weights are dequantized, and keep the rounded values with which the adapters were trained. To add adapters to other
    weights, use ``load_adapter``.
    """
    dtypes = {adapter.lora_A.weight.dtype for _, _, adapter in _adapted_layers(model)}
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            dequantize(module, *dtypes)
    for _, linear, adapter in list(_adapted_layers(model)):
        with torch.no_grad():
            linear.weight.copy_(linear.weight.to(adapter.delta_weight.dtype) + adapter.delta_weight)
        linear._forward_hooks = type(linear._forward_hooks)(
            (key, hook) for key, hook in linear._forward_hooks.items() if hook is not _add_adapter
        )
        del linear.adapter
    model.adapters = None
    return model.requires_grad_(True)


def save_adapter(model: LLM, cfg: LoRAConfig, folder: str | Path, base: str = "") -> None:
    """Write the adapters of an unsharded model in the format of peft. ``base``: path of the base model."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {_peft_name(name): tensor.detach().cpu().contiguous() for name, tensor in _adapter_parameters(model).items()}
    save_file(state, folder / _FILE, metadata={"format": "pt"})
    (folder / _FILE).chmod(0o644)
    (folder / _CONFIG).write_text(json.dumps(_peft_config(cfg, base), indent=2) + "\n")


def _peft_config(cfg: LoRAConfig, base: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": cfg.rank, "lora_alpha": cfg.alpha,
        "lora_dropout": cfg.dropout, "use_rslora": cfg.stabilised, "target_modules": sorted(cfg.targets), "bias": "none",
        "fan_in_fan_out": False, "inference_mode": True, "modules_to_save": None,
    }  # fmt: skip


def files(model: LLM, export: Callable[..., None]) -> dict[str, Callable[[Path], Any]]:
    """Return the files of a run and their writers: the adapters, as ``save_adapter`` writes them."""
    origin = next((o for p in model.parameters() if (o := getattr(p, "origin", None))), "")
    config = json.dumps(_peft_config(model.adapters, str(Path(origin).parent) if origin else ""), indent=2) + "\n"

    def write(path: Path) -> None:
        export(path, names=lambda name: _peft_name(name) if ".adapter.lora_" in name else None)

    return {f"adapter/{_FILE}": write, f"adapter/{_CONFIG}": lambda path: path.write_text(config)}


def load_adapter(model: LLM, folder: str | Path) -> LoRAConfig:
    """Add the adapters in a folder of peft or ``save_adapter`` to ``model``, and return their settings. Raises CheckpointError for
    adapters of another model or type, or damaged ones; the model is then unchanged."""
    folder = Path(folder)
    cfg = read_adapter_config(folder)
    saved = open_tensors(folder / _FILE)
    names = [name for name, x in model.named_modules() if isinstance(x, nn.Linear) and name.rpartition(".")[2] in cfg.targets]
    expected = {_peft_name(f"{name}.adapter.{half}.weight") for name in names for half in ("lora_A", "lora_B")}
    if wrong := sorted(expected ^ set(saved)) or ([] if expected else ["no adapter of a layer of this rank"]):
        problem = "belongs to no layer of the model" if wrong[0] in saved else "is missing"
        raise CheckpointError(f"{folder}: {wrong[0]} {problem}; is it an adapter of this model?")
    for name in names:
        outputs, inputs = shard_spec(model.get_parameter(f"{name}.weight")).global_shape
        for half, size in (("lora_A", (cfg.rank, inputs)), ("lora_B", (outputs, cfg.rank))):
            key = _peft_name(f"{name}.adapter.{half}.weight")
            if saved[key].size != size:
                raise CheckpointError(f"{folder}: {key} is {list(saved[key].size)}, expected {list(size)}; it is of another model")
    adapt(model, cfg)
    for name, parameter in _adapter_parameters(model).items():
        source = saved[_peft_name(name)]
        with torch.no_grad():
            for offsets, box in shard_spec(parameter).boxes((0, 0), tuple(parameter.shape)):
                sizes = parameter[box].shape
                parameter[box] = source[tuple(slice(a, a + n) for a, n in zip(offsets, sizes))].to(parameter)
    return cfg


def read_adapter_config(folder: Path) -> LoRAConfig:
    path, expected = folder / _CONFIG, "settings of an adapter as peft writes them, with a peft_type"
    config = read_object(path, expected)
    kind = config.get("peft_type")
    odd = [name for name in ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out") if config.get(name)]
    if kind != "LORA" or odd or config.get("bias", "none") != "none":
        reason = f"an adapter of kind {kind!r}" if kind != "LORA" else f"{odd[0] if odd else 'bias'} is set"
        raise CheckpointError(f"{path}: {reason}; expected a plain LORA")
    keys = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "target_modules"}
    with check_fields(path, expected, keys=keys):
        return LoRAConfig(
            rank=config["r"], alpha=config["lora_alpha"], dropout=config.get("lora_dropout") or 0.0,
            stabilised=bool(config.get("use_rslora")), targets=tuple(sorted(config["target_modules"])),
        )  # fmt: skip


def _add_adapter(linear: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    adapter: Any = linear.adapter
    return output + adapter(args[0])


def _adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any, Adapter]]:
    for name, module in model.named_modules():
        if isinstance(getattr(module, "adapter", None), Adapter):
            yield name, module, module.adapter


def _adapter_parameters(model: LLM) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if ".adapter.lora_" in name}


def _peft_name(name: str) -> str:
    return _PREFIX + name.replace(".adapter.", ".")
