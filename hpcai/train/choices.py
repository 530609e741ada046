"""What settings mean for a step: what ``auto`` chooses on this machine, and how gradients are summed."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hpcai.dist.collectives import get_backend
from hpcai.dist.mesh import Mesh
from hpcai.errors import ConfigError
from hpcai.kernels import float8, triton_support
from hpcai.nn.products import multiply_in_eighths
from hpcai.parallel.replicate import GradientSums
from hpcai.parallel.shard import FullySharded, ShardedSums
from hpcai.settings import StepConfig
from hpcai.train.compiling import blocks
from hpcai.train.optim import decayed


def chosen(cfg: StepConfig, mesh: Mesh, captures: bool = False) -> tuple[StepConfig, list[str]]:
    """``cfg`` with every ``auto`` replaced, and a sentence for each. ``captures``: something other than CUDA records the step.

    Raises ConfigError for what this machine cannot do.
    """
    changes: dict[str, Any] = {} if mesh.trains else {"shard": "none", "shard_within": None, "capture": "none"}
    cfg = cfg.model_copy(update=changes)  # processes that only evaluate hold the weights whole
    notes: list[str] = []
    if cfg.precision == "auto":
        changes["precision"], reason = ("bf16", "computes in bfloat16") if fast_bf16(mesh.device) else ("fp32", "does not")
        notes.append(f"step.precision: {changes['precision']}, since {mesh.device.type} {reason} at full speed")
    cannot = None if captures else _cannot_capture(cfg, mesh)
    if cfg.capture == "auto":
        changes["capture"] = "none" if cannot else "whole"
        notes.append(f"step.capture: {changes['capture']}" + (f", since {cannot}" if cannot else ""))
    elif cfg.capture != "none" and cannot:
        raise ConfigError(f"step.capture is {cfg.capture}, but {cannot}; set step.capture=auto or none")
    return cfg.model_copy(update=changes), notes


def narrow_products(model: nn.Module, cfg: StepConfig, device: torch.device) -> list[str]:
    """Let the linear layers of parts that say they have ``float8``, less those of parts within that deny it, multiply as
    ``cfg.products`` says -> a sentence about that. Raises ConfigError for a model that names none, and for a GPU that cannot."""
    if cfg.products == "precision":
        return []
    if device.type == "cuda" and not float8.is_supported(device):
        raise ConfigError(
            f"step.products is fp8, but {torch.cuda.get_device_name(device)} does not multiply 8 bits, as those of compute "
            "capability 8.9 and more do; set it to precision"
        )
    found = [(name, part) for name, part, named in _parts(model, "float8") if named and isinstance(part, nn.Linear)]
    if not found:
        raise ConfigError(f"step.products is fp8, but {type(model).__name__} names no layers for it; set it to precision")
    for name, linear in found:
        multiply_in_eighths(linear, name)
    slow = "" if device.type == "cuda" else f"; {device.type} rounds as a GPU does, and is not faster for it"
    return [f"step.products: {len(found)} linear layers multiply in 8 bits of floating point{slow}"]


def _parts(model: nn.Module, what: str, name: str = "", named: bool = False) -> Iterator[tuple[str, nn.Module, bool]]:
    """Every part, and whether it says ``what`` of itself, or is within one that does."""
    named = getattr(model, what, named)
    yield name, model, named
    for child, part in model.named_children():
        yield from _parts(part, what, f"{name}.{child}".lstrip("."), named)


def tune(cfg: StepConfig, device: torch.device) -> list[str]:
    """Set how CUDA multiplies in float32 and how cuDNN chooses, for the whole process -> a sentence for each that was asked for,
    and one where kernels cannot be compiled."""
    asked = {"tf32": cfg.tf32 != "auto", "cudnn_benchmark": cfg.cudnn_benchmark}
    if device.type == "cuda" and asked["tf32"]:
        # Not fp32_precision: torch refuses to read one of the two after the other was set, and torch.compile reads this one.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = bool(cfg.tf32)
    if device.type == "cuda" and asked["cudnn_benchmark"]:
        torch.backends.cudnn.benchmark = True
    why = "for this whole process" if device.type == "cuda" else f"without effect: this process computes on {device.type}"
    plain = device.type == "cuda" and triton_support.MISSING
    slow = [f"kernels: plain operations of torch, which are slower: {triton_support.MISSING}"] if plain else []
    return slow + [f"step.{name}: {str(getattr(cfg, name)).lower()}, {why}" for name, is_asked in asked.items() if is_asked]


def _cannot_capture(cfg: StepConfig, mesh: Mesh) -> str | None:
    if mesh.device.type != "cuda":
        return f"there is no GPU: this process computes on {mesh.device.type}"
    if cfg.shard == "weights":
        return "fully sharded weights are not captured"
    if mesh["pipeline"].size > 1:
        return "stages of a pipeline are not captured"
    carrier = get_backend(mesh.device, mesh.peers)
    return None if carrier in ("nccl", "none") else f"the processes communicate over {carrier}, whose sums cannot be captured"


def fast_bf16(device: torch.device) -> bool:
    """Whether products in bfloat16 are faster than in float32. A CPU needs instructions for them (AVX512-BF16 or AMX): 3D
    convolutions are then 1.3 to 1.8 times as fast, and without them up to four times slower (docs/benchmarks.md)."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    tests = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(test() for test in tests if test is not None)


def gradient_sums(model: nn.Module, mesh: Mesh, cfg: StepConfig) -> GradientSums | FullySharded:
    """How the gradients of ``model`` are added, by ``cfg.shard``; with ``bf16-params`` the model's parameters change to bfloat16.

    Raises MeshError when ``cfg.shard_within`` does not divide the copies, ConfigError for what a pipeline cannot do.
    """
    if cfg.compile == "whole" and mesh["pipeline"].size > 1:
        raise ConfigError("step.compile is whole, but no process has the whole model of a pipeline; set it to blocks or none")
    decays, alone = decayed(model, cfg, mesh["pipeline"]), mesh["replicate"].size == 1
    axes = None if cfg.shard_within is None or alone else mesh.split("replicate", cfg.shard_within, "step.shard_within")
    if cfg.shard == "weights" and not alone:
        return FullySharded(model, mesh, decays, blocks(model), axes, cfg.precision == "bf16-params")
    if cfg.precision == "bf16-params":
        narrow(model)
    wide = cfg.accumulate > 1
    if cfg.shard == "none" or alone:
        return GradientSums(model, mesh, cfg.bucket_mb, decays, wide, fixed=cfg.capture != "none")
    overlap = cfg.capture == cfg.compile == "none"
    return ShardedSums(model, mesh, cfg.bucket_mb, decays, wide, axes, overlap)


def narrow(model: nn.Module) -> None:
    """Turn parameters to bfloat16, in place. Modules with running statistics keep theirs in float32, and so do those that say they
    are ``wide``, with all within them."""
    if getattr(model, "wide", False):
        return
    if not any(buffer.is_floating_point() for buffer in model.buffers(recurse=False)):
        for parameter in model.parameters(recurse=False):
            if parameter.is_floating_point():  # frozen weights may have 8 bits
                parameter.data = parameter.data.bfloat16()
    for child in model.children():
        narrow(child)
