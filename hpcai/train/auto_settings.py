"""Effective settings of a step: values of ``auto`` on this machine, and the reduction of gradients."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hpcai.dist.collectives import get_backend
from hpcai.dist.mesh import Mesh
from hpcai.errors import ConfigError
from hpcai.kernels import float8, triton_support
from hpcai.nn.matmul import check_float8_size, convert_to_float8
from hpcai.nn.moe import Experts
from hpcai.parallel.data_parallel import GradientReducer
from hpcai.parallel.fsdp import FSDP, ShardedReducer
from hpcai.settings import StepConfig
from hpcai.train.compiling import repeated_blocks
from hpcai.train.optim import match_names


def resolve_auto(cfg: StepConfig, mesh: Mesh, custom_graph: bool = False) -> tuple[StepConfig, list[str]]:
    """Return ``cfg`` with every ``auto`` replaced, and a message for each. ``custom_graph``: a given graph records the step, not a
    CUDA graph. Raises ConfigError if this machine does not support a setting."""
    changes: dict[str, Any] = {} if mesh.trains else {"shard": "none", "shard_within": None, "capture": "none"}
    cfg = cfg.model_copy(update=changes)  # ranks that only evaluate hold full weights
    messages: list[str] = []
    if cfg.precision == "auto":
        changes["precision"], reason = ("bf16", "computes in bfloat16") if has_fast_bf16(mesh.device) else ("fp32", "does not")
        messages.append(f"step.precision: {changes['precision']}, since {mesh.device.type} {reason} at full speed")
    obstacle = None if custom_graph else _capture_obstacle(cfg, mesh)
    if cfg.capture == "auto":
        changes["capture"] = "none" if obstacle else "whole"
        messages.append(f"step.capture: {changes['capture']}" + (f", since {obstacle}" if obstacle else ""))
    elif cfg.capture != "none" and obstacle:
        raise ConfigError(f"step.capture is {cfg.capture}, but {obstacle}; set step.capture=auto or none")
    return cfg.model_copy(update=changes), messages


def enable_float8(model: nn.Module, cfg: StepConfig, device: torch.device) -> list[str]:
    """Enable FP8 products, if ``cfg.matmul`` is fp8, in linear layers and experts whose ``float8`` attribute is true, or else that
    of their nearest ancestor with one. Return a message. Raises ConfigError if there is no such layer, or the GPU has no FP8 tensor
    cores or no kernels for experts."""
    if cfg.matmul == "precision":
        return []
    if device.type == "cuda" and not float8.is_supported(device):
        raise ConfigError(
            f"step.matmul is fp8, but {torch.cuda.get_device_name(device)} has no FP8 tensor cores "
            "(compute capability 8.9 or higher); set it to precision"
        )
    tagged = list(_float8_modules(model))
    linears = [(name, part) for name, part in tagged if isinstance(part, nn.Linear)]
    experts = [(name, part) for name, part in tagged if isinstance(part, Experts)]
    if not linears and not experts:
        raise ConfigError(f"step.matmul is fp8, but {type(model).__name__} has no layers for it; set it to precision")
    if experts and device.type == "cuda" and triton_support.MISSING:
        raise ConfigError(f"step.matmul is fp8, but {experts[0][0]} needs kernels: {triton_support.MISSING}")
    for name, linear in linears:
        convert_to_float8(linear, name)
    for name, layer in experts:
        check_float8_size(f"{name}.gate_proj", layer.get_parameter("gate_proj").shape[1:])  # the others have the same sizes
        layer.float8_matmul = True
    remark = "" if device.type == "cuda" else f"; {device.type} emulates its rounding, without a speedup"
    layers = f"{len(linears)} linear layers" + (f" and {len(experts)} mixtures of experts" if experts else "")
    return [f"step.matmul: {layers} use FP8{remark}"]


def _float8_modules(model: nn.Module, name: str = "", inherited: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with a true ``float8`` attribute, which descendants inherit, and their names."""
    if enabled := getattr(model, "float8", inherited):
        yield name, model
    for child, part in model.named_children():
        yield from _float8_modules(part, f"{name}.{child}".lstrip("."), enabled)


def set_backend_flags(cfg: StepConfig, device: torch.device) -> list[str]:
    """Set TF32 and cuDNN benchmarking for the process. Return a message for each of them that ``cfg`` sets, and one if kernels
    cannot be compiled."""
    requested = {"tf32": cfg.tf32 != "auto", "cudnn_benchmark": cfg.cudnn_benchmark}
    if device.type == "cuda" and requested["tf32"]:
        # Not fp32_precision: torch raises if one of the two is read after the other was set, and torch.compile reads this one.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = bool(cfg.tf32)
    if device.type == "cuda" and requested["cudnn_benchmark"]:
        torch.backends.cudnn.benchmark = True
    effect = "for this whole process" if device.type == "cuda" else f"without effect: this process computes on {device.type}"
    unfused = device.type == "cuda" and triton_support.MISSING
    messages = [f"kernels: torch operations, which are slower: {triton_support.MISSING}"] if unfused else []
    return messages + [f"step.{name}: {str(getattr(cfg, name)).lower()}, {effect}" for name, is_set in requested.items() if is_set]


def _capture_obstacle(cfg: StepConfig, mesh: Mesh) -> str | None:
    if mesh.device.type != "cuda":
        return f"there is no GPU: this rank computes on {mesh.device.type}"
    if cfg.shard == "weights":
        return "fully sharded weights are not captured"
    if mesh["pipeline"].size > 1:
        return "stages of a pipeline are not captured"
    transport = get_backend(mesh.device, mesh.peers)
    return None if transport in ("nccl", "none") else f"collectives of {transport} cannot be captured"


def has_fast_bf16(device: torch.device) -> bool:
    """Return whether bfloat16 products are faster than float32 ones. A CPU needs instructions for them (AVX512-BF16 or AMX): 3D
    convolutions are then 1.3 to 1.8 times as fast, and without them up to four times slower (docs/benchmarks.md)."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    tests = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(test() for test in tests if test is not None)


def build_reducer(model: nn.Module, mesh: Mesh, cfg: StepConfig) -> GradientReducer | FSDP:
    """Return the reducer of the gradients of ``model``, by ``cfg.shard``. With ``bf16-params`` it also casts the parameters to
    bfloat16. Raises MeshError if ``cfg.shard_within`` does not divide the replicas, ConfigError if a pipeline does not support a
    setting."""
    if cfg.compile == "whole" and mesh["pipeline"].size > 1:
        raise ConfigError("step.compile is whole, but no rank of a pipeline has the full model; set it to blocks or none")
    decays, matrices = (match_names(model, cfg, setting, mesh["pipeline"]) for setting in ("decay_names", "muon_names"))
    alone = mesh["replicate"].size == 1
    axes = None if cfg.shard_within is None or alone else mesh.split("replicate", cfg.shard_within, "step.shard_within")
    if cfg.shard == "weights" and not alone:
        return FSDP(model, mesh, decays, repeated_blocks(model), axes, cfg.precision == "bf16-params")
    if cfg.precision == "bf16-params":
        cast_to_bf16(model)
    accumulates = cfg.accumulate > 1
    if cfg.shard == "none" or alone:
        return GradientReducer(model, mesh, cfg.bucket_mb, decays, accumulates, fixed=cfg.capture != "none", matrices=matrices)
    overlap = cfg.capture == cfg.compile == "none"
    return ShardedReducer(model, mesh, cfg.bucket_mb, decays, accumulates, axes, overlap, matrices)


def cast_to_bf16(model: nn.Module) -> None:
    """Cast parameters to bfloat16, in place. Modules with running statistics stay in float32, and so do modules with a true
    ``wide`` attribute and their descendants."""
    if getattr(model, "wide", False):
        return
    if not any(buffer.is_floating_point() for buffer in model.buffers(recurse=False)):
        for parameter in model.parameters(recurse=False):
            if parameter.is_floating_point():  # frozen weights may be int8
                parameter.data = parameter.data.bfloat16()
    for child in model.children():
        cast_to_bf16(child)
