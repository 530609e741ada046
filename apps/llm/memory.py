"""What a run of a language model needs of memory and of computation, from its settings alone. No torch here, so that it is told at
once, and on a login node.

    memory.parts(cfg, 64)       # bytes of the fullest of 64 processes, by what they are for
    memory.refuse(cfg, mesh)    # before anything is allocated

An estimate without norms and biases: tests compare it with a trace of the step (hpcai.plan.step_trace); it differs by 5 %
at most, by 10 where ``step.shard`` cuts weights; ``hpcai plan llm`` records the step itself. Korthikanti et al. ("Reducing
Activation Recomputation in Large Transformer Models", 2022) count the activations of GPT's layers alike.
"""

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from apps.llm.settings import Config
from hpcai.dist.environment import read_rank_info
from hpcai.errors import LaunchError, MeshError

if TYPE_CHECKING:
    from hpcai.dist import Mesh

_MARGIN = 1.15
"""times the room that an estimate must be for a run to be refused"""
_LOGITS = 1 << 28  # bytes of float32 logits that a GPU computes at a time (hpcai.kernels.chunking)
_BF16_SUM_RANKS = 4  # ranks whose gradients are added up in bfloat16 (hpcai.parallel.data_parallel)
_ATTENTION_INPUTS, _FEED_FORWARD_INPUTS = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")  # layers that read a norm's result
_MOMENTS = {"adam": 2, "adamw": 2, "lamb": 3, "sgd": 1, "lars": 1}  # lamb's third is the direction


@dataclass(frozen=True)
class MeshSizes:
    """A mesh: how many processes along each axis."""

    replicate: int
    tensor: int
    context: int
    pipeline: int

    @classmethod
    def from_config(cls, cfg: Config, world: int) -> "Sizes":
        """Raises MeshError where the processes cannot be divided so."""
        mesh = cfg.mesh
        within, train = mesh.tensor * mesh.context * mesh.pipeline, world - mesh.evaluate
        if train < within or train % within or mesh.replicate not in (-1, train // within):
            raise MeshError(f"{world} processes cannot be mesh {mesh.model_dump()}: give a multiple of {within}, or other sizes")
        return cls(train // within, mesh.tensor, mesh.context, mesh.pipeline)


def describe(cfg: Config) -> list[str]:
    """What ``--show`` says beside the settings: memory, parameters, tokens of a step, operations of a token."""
    try:
        ranks, mesh = read_rank_info().world or 1, cfg.mesh
    except LaunchError:
        ranks = 1
    within = mesh.tensor * mesh.context * mesh.pipeline
    world = mesh.evaluate + within * (max((ranks - mesh.evaluate) // within, 1) if mesh.replicate == -1 else mesh.replicate)
    sizes, tokens = MeshSizes.from_config(cfg, world), row_tokens(cfg)
    named = " x ".join(f"{name} {size}" for name, size in vars(sizes).items() if size > 1) or "one copy, not cut"
    breakdown = {name: bytes for name, bytes in estimate_bytes(cfg, world).items() if bytes}
    width = max(map(len, breakdown))
    lines = [f"GB of the process that needs most, of {world} ({named}), about:"]
    lines += [f"  {name:<{width}} {bytes / 1e9:9.3f}" for name, bytes in breakdown.items()]
    lines += [f"  {'in all':<{width}} {sum(breakdown.values()) / 1e9:9.3f}"]
    full, causal = (flops_per_token(cfg, tokens, half) for half in (False, True))
    if mesh.replicate == -1 and ranks == 1:
        lines.append("mesh.replicate=N tells of N copies")
    trained = "" if cfg.lora is None else f", {_adapter_parameters(cfg):,} of them trained"
    return [
        *lines, f"{cfg.model.num_parameters + (_adapter_parameters(cfg) if cfg.lora else 0):,} parameters{trained}",
        f"{cfg.data.batch * tokens:,} tokens a step: {cfg.data.batch} rows of {tokens}",
        f"{full / 1e9:.2f} G multiplications and additions a token, {causal / 1e9:.2f} G where attention looks back alone",
    ]  # fmt: skip


def flops_per_token(cfg: Config, tokens: int, causal: bool) -> float:
    """Multiplications and additions of a token, forward and backward: 6 of each number that multiplies it (4 where it is frozen),
    and of each layer 12 of each channel of the heads and each token seen (Narayanan et al., SC21, appendix; NVIDIA's figures count
    attention in full until 2025, then ``causal``)."""
    m = cfg.model
    products = m.num_parameters - _embedding_parameters(cfg) + m.vocabulary * m.width
    attention = 12 * m.layers * m.heads * m.head_dim * tokens * (0.5 if causal else 1.0)
    return attention + (6 * products if cfg.lora is None else 4 * products + 6 * _adapter_parameters(cfg))


def check_memory(cfg: Config, mesh: "Mesh", available: float | None = None) -> None:
    """Raise MeshError where a process surely needs more than ``room`` bytes, by default this machine's."""
    available = _available_bytes(mesh) if available is None else available
    breakdown = estimate_bytes(cfg, mesh.job.size)
    if (need := sum(breakdown.values())) <= _MARGIN * available:
        return
    largest = sorted(breakdown.items(), key=lambda part: -part[1])[:4]
    named = ", ".join(f"{name} {bytes / 1e9:.3g}" for name, bytes in largest if bytes)
    raise MeshError(
        f"a process needs about {need / 1e9:.3g} GB, there are {available / 1e9:.3g} ({named}). Less need step.shard=optimizer or"
        " weights (of several copies), model.recompute=selective or layers, a greater step.accumulate, mesh.tensor and"
        " mesh.pipeline; --show says at once how much"
    )


def _available_bytes(mesh: "Mesh") -> float:
    """Bytes that a process may have: its GPU's, or its part of what the node has free."""
    if mesh.device.type == "cuda":
        import torch

        return float(torch.cuda.mem_get_info(mesh.device)[1])
    try:
        with open("/proc/meminfo") as file:
            free = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return math.inf
    return 1024.0 * free / (read_rank_info().local_world or 1)


def row_tokens(cfg: Config) -> int:
    """Tokens of a row: as the data say, or where there are none here as many as the model may have."""
    try:
        return int(json.loads((cfg.data.directory / "text.json").read_bytes())["sequence"])
    except (OSError, ValueError, LookupError, TypeError):
        return cfg.model.positions


# ---- bytes


def estimate_bytes(cfg: Config, world: int) -> dict[str, float]:
    """Bytes of the process that needs most, by what they are for; their sum is what lives at the fullest moment, at which the loss
    head or a layer works. ``gathered``: weights that others hold (step.shard=weights). Buffers of CUDA's libraries are not in it.
    """
    sizes = MeshSizes.from_config(cfg, world)
    return max((_estimate_rank(cfg, sizes, rank) for rank in (0, sizes.pipeline - 1)), key=lambda breakdown: sum(breakdown.values()))


def _estimate_rank(cfg: Config, sizes: MeshSizes, rank: int) -> dict[str, float]:
    """``parts`` of the first or the last rank along the pipeline."""
    m, step, both = cfg.model, cfg.step, cfg.stages.schedule == "zero-bubble-v"  # both ends are on the first rank
    first, last = rank == 0, rank == 0 if both else rank == sizes.pipeline - 1
    n, local_layers, shards = sizes.tensor, -(-m.layers // sizes.pipeline), step.shard == "weights" and sizes.replicate > 1
    tokens = max(cfg.data.batch // (sizes.replicate * step.accumulate), 1) * row_tokens(cfg) // sizes.context
    hidden, product = _element_bytes(cfg)
    keys = m.kv_heads * max(n // m.kv_heads, 1) - m.kv_heads  # heads of keys that several ranks hold
    layer = (m.num_parameters - _embedding_parameters(cfg)) / m.layers / n + 2 * keys * m.head_dim * m.width / n
    ends = _embedding_parameters(cfg) / n if sizes.pipeline == 1 else m.vocabulary * m.width / n
    breakdown = _state_bytes(cfg, sizes, local_layers * layer + ends, trained=cfg.lora is None)
    adapters = _adapter_parameters(cfg) * local_layers / m.layers / n if cfg.lora else 0.0
    breakdown["adapters"] = sum(_state_bytes(cfg, sizes, adapters, trained=True).values())
    saved, boundary = (_saved_activations(cfg, sizes, tokens, recompute) for recompute in (m.recompute, "layers"))
    in_flight = _micro_batches_in_flight(cfg, sizes, rank)
    breakdown["activations"] = local_layers * saved * in_flight
    if sizes.pipeline > 1:  # what comes and goes between stages, for each micro-batch (torch's stages)
        stages = cfg.stages.per_rank
        breakdown["messages"] = boundary * (step.accumulate * (2.0 * stages - first - last) + in_flight * (stages - last))
    cast = hidden != product and step.matmul != "fp8"
    breakdown["copies"] = product * local_layers * layer * cast if m.recompute != "layers" else 0.0
    recomputed = _saved_activations(cfg, sizes, tokens, "none") + product * layer * cast if m.recompute == "layers" else 0.0
    breakdown["layer or head"] = max(_layer_backward(cfg, sizes, tokens) + recomputed, _loss_head(cfg, sizes, tokens) if last else 0.0)
    weight = 2 if step.precision == "bf16-params" else max(hidden, 4)
    in_transit = (weight + max(hidden, 4)) * (layer if cfg.lora is None else adapters / local_layers)
    breakdown["gathered"] = weight * (ends + 2 * layer) + in_transit if shards else 0.0
    return breakdown


def _embedding_parameters(cfg: Config) -> int:
    """Parameters that are not of layers: embedding, positions and the last layer."""
    m = cfg.model
    return m.vocabulary * m.width * (1 if m.tied else 2) + (0 if m.rotary else m.positions * m.width)


def _adapter_parameters(cfg: Config) -> int:
    """Parameters of all adapters."""
    m = cfg.model
    heads, keys = m.heads * m.head_dim, m.kv_heads * m.head_dim
    ends = {"q_proj": m.width + heads, "k_proj": m.width + keys, "v_proj": m.width + keys, "o_proj": heads + m.width}
    ends |= dict.fromkeys(("up_proj", "gate_proj", "down_proj"), m.width + m.inner)
    return 0 if cfg.lora is None else m.layers * cfg.lora.rank * sum(ends.get(name, 0) for name in cfg.lora.targets)


def _element_bytes(cfg: Config) -> tuple[int, int]:
    """Bytes of a number of the hidden state, and of one in a product."""
    return {"fp32": (4, 4), "fp64": (8, 8), "bf16-params": (2, 2)}.get(cfg.step.precision, (4, 2))


def _state_bytes(cfg: Config, sizes: MeshSizes, count: float, trained: bool) -> dict[str, float]:
    """Weights, gradients in their buckets, and the optimizer's numbers (Rajbhandari et al., "ZeRO", SC20, table 1)."""
    step, replicas = cfg.step, sizes.replicate
    narrow, wide = step.precision == "bf16-params", 8 if step.precision == "fp64" else 4
    shard = step.shard if replicas > 1 else "none"
    fraction = 1 / ((step.shard_within or replicas) if shard != "none" else 1)
    weight = 2 if narrow and not (trained and shard == "weights") else wide
    sums = 4 if narrow and (step.accumulate > 1 or replicas * sizes.context > _BF16_SUM_RANKS) else weight
    moment = 2 if step.moments == "bf16" else wide
    moments = _MOMENTS[step.optimizer] - (step.optimizer in ("sgd", "lars") and not step.momentum)
    moment_bytes = wide + moment * (moments - 1) if step.optimizer == "lamb" else moment * moments
    updated = count * fraction * trained
    return {
        "weights": weight * count * (fraction if shard == "weights" else 1),
        "gradients": sums * count * trained * {"none": 1.0, "optimizer": 1 + fraction, "weights": fraction}[shard],
        "optimizer": updated * (moment_bytes + (wide if weight == 2 else 0)),  # with the master weights
        "average": updated * wide if step.ema_decay is not None else 0.0,
    }


def _micro_batches_in_flight(cfg: Config, sizes: MeshSizes, rank: int) -> float:
    """Micro-batches whose activations a rank holds at a time, of all its layers: Narayanan et al., SC21, section 2.2."""
    p, per_rank, micro_batches = sizes.pipeline, cfg.stages.per_rank, cfg.step.accumulate
    if p == 1:
        return 1.0
    if cfg.stages.schedule == "gpipe":
        return float(micro_batches)
    if per_rank == 1 or cfg.stages.schedule == "zero-bubble-v":
        return float(min(p - rank * (per_rank == 1), micro_batches))
    turn = micro_batches // max(micro_batches // p, 1)
    ahead = (per_rank - 1) * turn + (1 if cfg.stages.schedule == "zero-bubble" else 2) * (p - 1 - rank)
    return min(ahead + 1, micro_batches * per_rank) / per_rank


def _saved_activations(cfg: Config, sizes: MeshSizes, tokens: int, recompute: str) -> float:
    """Activations of one layer that the backward pass reads."""
    m, n, (hidden, product), local_tokens = cfg.model, sizes.tensor, _element_bytes(cfg), tokens // sizes.tensor
    trained, adapted = cfg.lora is None, set(cfg.lora.targets if cfg.lora else ())
    if recompute == "layers":
        return hidden * m.width * local_tokens
    saved = 2.0 * hidden * m.width * local_tokens
    if recompute != "selective":  # what norms give; a frozen layer keeps no input, one that is cut does
        saved += product * m.width * local_tokens * sum(trained or n > 1 or not adapted.isdisjoint(names) for names in (_ATTENTION_INPUTS, _FEED_FORWARD_INPUTS))
    varlen = cfg.data.documents == "apart" and product == 2 and sizes.context == 1
    keys = m.kv_heads * m.head_dim * max(n // m.kv_heads, 1) // n
    saved += tokens * (product * ((2 + varlen) * m.heads * m.head_dim // n + 2 * keys) + 4 * m.heads // n)
    saved += 0 if varlen or cfg.data.documents == "joined" else product * tokens * row_tokens(cfg)  # the mask, as attention has it
    inner = (2 if m.feed == "swiglu" else 1) + (recompute == "none" and (trained or "down_proj" in adapted))
    saved += inner * tokens * product * m.inner // n
    if cfg.lora is not None and cfg.lora.dropout:  # what goes into A, and which of it was dropped
        saved += len(adapted) * (product + 1) * m.width * local_tokens
    return saved + 2 * m.width * local_tokens * (m.dropout > 0)


def _layer_backward(cfg: Config, sizes: MeshSizes, tokens: int) -> float:
    """What backward through a layer makes beside what was kept: gradients of its hidden states, inside its feed-forward part the
    more where it is wide, and where weights are cut those of all tokens, which are gathered and sent."""
    m, n, (hidden, product) = cfg.model, sizes.tensor, _element_bytes(cfg)
    inner = product * tokens * m.inner // n
    first = product * m.width * (tokens + m.inner) // n + inner  # through the last of its layers, with the gradient of a weight
    within = 2 * inner if m.feed == "swiglu" else 0
    gathered = 4 * product * m.width * tokens - 2 * inner if n > 1 else 0
    return hidden * m.width * tokens // n + max(first, within, gathered)


def _loss_head(cfg: Config, sizes: MeshSizes, tokens: int) -> float:
    """The last norm, and logits of some tokens at a time, backward (hpcai.nn.lm_head)."""
    m, n, (hidden, product) = cfg.model, sizes.tensor, _element_bytes(cfg)
    wide, vocabulary = max(hidden, 4), -(-m.vocabulary // n)
    logits, weight = min(tokens, max(_LOGITS // (4 * vocabulary), 1)) * vocabulary, vocabulary * m.width
    trained = weight if cfg.lora is None else 0
    final = m.width * (tokens // n * (hidden + product) + tokens * product * (n > 1)) + product * weight * (hidden != product)
    at_once = logits * (wide + product * (product != wide))
    return final + product * m.width * tokens + wide * trained + max(at_once, (logits + trained) * product)
