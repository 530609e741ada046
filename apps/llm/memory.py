"""Memory and FLOPs of a language model's run, estimated from its settings. No torch is imported: it is fast on a login node too.

    memory.estimate_bytes(cfg, 64)  # bytes by purpose, of the rank that needs most among 64
    memory.check_memory(cfg, mesh)  # before anything is allocated

The estimate omits norms and biases. Tests compare it with a trace of the step (hpcai.plan.step_trace): it differs by at most 5 %,
or 10 % if ``step.shard`` shards weights. ``hpcai plan llm`` records the step itself. Korthikanti et al. ("Reducing Activation
Recomputation in Large Transformer Models", 2022) count the activations of GPT's layers in the same way.
"""

import json
from typing import TYPE_CHECKING

from apps.llm.settings import Config
from hpcai.dist.environment import read_rank_info
from hpcai.errors import LaunchError, MeshError
from hpcai.settings import mesh_shape

if TYPE_CHECKING:
    from hpcai.dist import Mesh

_MARGIN = 1.15
"""ratio of estimated to available memory above which a run is refused"""
_LOGITS = 1 << 28  # bytes of float32 logits that a GPU computes at a time (hpcai.kernels.chunking)
_BF16_SUM_RANKS = 4  # most ranks whose gradients are reduced in bfloat16 (hpcai.parallel.data_parallel)
_AFTER_NORMS = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")  # layers whose input is the output of a norm
_MOMENTS = {"adam": 2, "adamw": 2, "lamb": 3, "sgd": 1, "lars": 1, "muon": 1}  # lamb's third is the direction
CONVENTION = "6 FLOPs a token for each weight of a matrix (4 if frozen), attention in full"


def describe(cfg: Config) -> list[str]:
    """Return the lines that ``--show`` adds to the settings: memory, parameters, tokens of a step, FLOPs of a token."""
    try:
        ranks, mesh = read_rank_info().world or 1, cfg.mesh
    except LaunchError:
        ranks = 1
    within = mesh.tensor * mesh.context * mesh.pipeline
    world = mesh.evaluate + within * (max((ranks - mesh.evaluate) // within, 1) if mesh.replicate == -1 else mesh.replicate)
    tokens, sizes = row_tokens(cfg), _resolve_mesh(cfg, world).mesh.model_dump()
    axes = [f"{name} {sizes[name]}" for name in ("replicate", "tensor", "context", "pipeline") if sizes[name] > 1]
    named = " x ".join(axes) or "one replica, unsharded"
    breakdown = {name: bytes for name, bytes in estimate_bytes(cfg, world).items() if bytes}
    width = max(map(len, breakdown))
    lines = [f"GB of the rank that needs most, of {world} ({named}), about:"]
    lines += [f"  {name:<{width}} {bytes / 1e9:9.3f}" for name, bytes in breakdown.items()]
    lines += [f"  {'in all':<{width}} {sum(breakdown.values()) / 1e9:9.3f}"]
    full, causal = (flops_per_token(cfg, tokens, half) for half in (False, True))
    if mesh.replicate == -1 and ranks == 1:
        lines.append("mesh.replicate=N estimates N replicas")
    trained = "" if cfg.lora is None else f", {_adapter_parameters(cfg):,} of them trained"
    return [
        *lines, f"{cfg.model.num_parameters + (_adapter_parameters(cfg) if cfg.lora else 0):,} parameters{trained}",
        f"{cfg.data.batch * tokens:,} tokens a step: {cfg.data.batch} rows of {tokens}",
        f"{full / 1e9:.2f} GFLOP a token, {causal / 1e9:.2f} GFLOP if attention counts as causal",
    ]  # fmt: skip


def flops_per_token(cfg: Config, tokens: int, causal: bool) -> float:
    """Return the FLOPs of a token, forward and backward: 6 for each weight of a matrix (4 if frozen), and in each layer 12 for each
    channel of the heads and each token attended to (Narayanan et al., SC21, appendix). NVIDIA's figures count attention in full
    until 2025, then ``causal``."""
    m = cfg.model
    products = m.num_active_parameters - _embedding_parameters(cfg) + (1 + m.mtp_layers) * m.vocabulary * m.width
    attention = 12 * m.total_layers * m.heads * m.head_dim * tokens * (0.5 if causal else 1.0)
    return attention + (6 * products if cfg.lora is None else 4 * products + 6 * _adapter_parameters(cfg))


def check_memory(cfg: Config, mesh: "Mesh", available: float | None = None) -> None:
    """Raise MeshError if a rank surely needs more than ``available`` bytes, by default those of its GPU, or its fraction of
    the node's free memory."""
    if available is None and mesh.device.type == "cuda":
        import torch

        available = float(torch.cuda.mem_get_info(mesh.device)[1])
    elif available is None:
        from hpcai.data.readers import available_memory

        available = available_memory() / (read_rank_info().local_world or 1)
    breakdown = estimate_bytes(cfg, mesh.job.size)
    if (need := sum(breakdown.values())) <= _MARGIN * available:
        return
    largest = sorted(breakdown.items(), key=lambda part: -part[1])[:4]
    named = ", ".join(f"{name} {bytes / 1e9:.3g}" for name, bytes in largest if bytes)
    raise MeshError(
        f"a rank needs about {need / 1e9:.3g} GB, available are {available / 1e9:.3g} ({named}). To need less, set step.shard to"
        " optimizer or weights (with several replicas), model.recompute to selective or layers, or increase step.accumulate,"
        " mesh.tensor or mesh.pipeline; --show prints the estimate at once"
    )


def row_tokens(cfg: Config) -> int:
    """Return the tokens of a row in the data, or if these are missing the maximum of the model."""
    try:
        return int(json.loads((cfg.data.directory / "text.json").read_bytes())["sequence"])
    except (OSError, ValueError, LookupError, TypeError):
        return cfg.model.positions


# ---- bytes


def estimate_bytes(cfg: Config, world: int) -> dict[str, float]:
    """Return the bytes of the rank that needs most, by purpose. Their sum is the peak, which is reached in the loss head or in a
    layer. ``gathered``: weights of other ranks (step.shard=weights). Buffers of CUDA's libraries are not included."""
    cfg = _resolve_mesh(cfg, world)
    estimates = (_estimate_rank(cfg, rank) for rank in (0, cfg.mesh.pipeline - 1))
    return max(estimates, key=lambda estimate: sum(estimate.values()))


def _resolve_mesh(cfg: Config, world: int) -> Config:
    """Return the settings with the number of replicas among ``world`` ranks. Raises MeshError if these cannot form the mesh."""
    shape, _ = mesh_shape(cfg.mesh.model_dump(exclude={"expert"}), world)
    return cfg.model_copy(update={"mesh": cfg.mesh.model_copy(update={"replicate": shape["replicate"]})})


def _estimate_rank(cfg: Config, rank: int) -> dict[str, float]:
    """Return ``estimate_bytes`` of the first or the last rank along the pipeline."""
    m, mesh, step = cfg.model, cfg.mesh, cfg.step
    both = cfg.stages.schedule == "zero-bubble-v"  # first and last stage are on the first rank
    first, last = rank == 0, rank == 0 if both else rank == mesh.pipeline - 1
    n, predicting, shards = mesh.tensor, m.mtp_layers if last else 0, step.shard == "weights" and mesh.replicate > 1
    local_layers = -(-m.layers // mesh.pipeline) + predicting
    tokens = max(cfg.data.batch // (mesh.replicate * step.accumulate), 1) * row_tokens(cfg) // mesh.context
    hidden, product = _element_bytes(cfg)
    keys = m.kv_heads * max(n // m.kv_heads, 1) - m.kv_heads  # key heads that are replicated on several ranks
    experts = (m.num_parameters - m.count_parameters(0)) / m.total_layers / n / mesh.expert  # of a rank in a layer
    joined, replicated = 2 * m.width**2, 2 * keys * m.head_dim * m.width  # the first of multi-token prediction, not sharded
    layer = (m.count_parameters(0) - _embedding_parameters(cfg) - m.mtp_layers * joined) / m.total_layers / n
    layer += experts + replicated / n
    ends = _embedding_parameters(cfg) / n if mesh.pipeline == 1 or predicting else m.vocabulary * m.width / n
    different = local_layers * experts if mesh.expert > 1 else 0.0  # replicas do not shard what they do not share
    shared = local_layers * layer + predicting * joined + ends - different
    nbytes = _state_bytes(cfg, shared, trained=cfg.lora is None, ends=ends)
    for name, value in _state_bytes(cfg, different, trained=cfg.lora is None, shard="none").items():
        nbytes[name] += value
    adapters = _adapter_parameters(cfg) * local_layers / m.total_layers / n if cfg.lora else 0.0
    nbytes["adapters"] = sum(_state_bytes(cfg, adapters, trained=True).values())
    saved, boundary = (_saved_activations(cfg, tokens, recompute) for recompute in (m.recompute, "layers"))
    in_flight = _micro_batches_in_flight(cfg, rank)
    inputs = m.width * tokens // n * (hidden + product if m.recompute == "layers" else 2 * hidden + 3 * product)
    nbytes["activations"] = (local_layers * saved + predicting * inputs) * in_flight
    if mesh.pipeline > 1:  # inputs and outputs of stages and their gradients, for each micro-batch (torch's stages)
        stages = cfg.stages.per_rank
        nbytes["messages"] = boundary * (step.accumulate * (2.0 * stages - first - last) + in_flight * (stages - last))
    cast = hidden != product and step.matmul != "fp8"
    nbytes["copies"] = product * local_layers * layer * cast if m.recompute != "layers" else 0.0
    recomputed = _saved_activations(cfg, tokens, "none") + product * layer * cast if m.recompute == "layers" else 0.0
    nbytes["layer or head"] = max(_layer_backward(cfg, tokens) + recomputed, _loss_head(cfg, tokens) if last else 0.0)
    if predicting:  # the gradients of the first cross entropy wait for those of the others
        nbytes["layer or head"] += max(hidden, 4) * m.vocabulary * m.width / n * (cfg.lora is None) + product * m.width * tokens
    weight = 2 if step.precision == "bf16-params" else max(hidden, 4)
    in_transit = (weight + max(hidden, 4)) * (layer if cfg.lora is None else adapters / local_layers)
    nbytes["gathered"] = weight * (ends + 2 * layer) + in_transit if shards else 0.0
    return nbytes


def _embedding_parameters(cfg: Config) -> int:
    """Return the number of parameters outside the layers: embedding, positions and output layer."""
    m = cfg.model
    return m.vocabulary * m.width * (1 if m.tied else 2) + (0 if m.rotary else m.positions * m.width)


def _adapter_parameters(cfg: Config) -> int:
    """Return the number of parameters of adapters, at most, and of the ends of the model that are trained beside them."""
    m, lora = cfg.model, cfg.lora
    heads, keys = m.heads * m.head_dim, m.kv_heads * m.head_dim
    ends = {"q_proj": m.width + heads, "k_proj": m.width + keys, "v_proj": m.width + keys, "o_proj": heads + m.width}
    ends |= dict.fromkeys(("up_proj", "gate_proj", "down_proj"), m.width + m.inner)
    vocab = m.vocabulary * m.width * sum(lora.saves(f"{name}.weight") for name in ("model.embed_tokens", "lm_head")) if lora else 0
    rank, names = (max(lora.rank, *lora.rank_pattern.values(), 0), lora.targets) if lora else (0, ())
    return vocab + m.total_layers * rank * sum(ends.get(name, 0) for name in {name.rpartition(".")[2] for name in names})


def _element_bytes(cfg: Config) -> tuple[int, int]:
    """Return the bytes of an element of the hidden state, and of a matrix product."""
    return {"fp32": (4, 4), "fp64": (8, 8), "bf16-params": (2, 2)}.get(cfg.step.precision, (4, 2))


def _state_bytes(cfg: Config, count: float, trained: bool, ends: float = 0.0, shard: str | None = None) -> dict[str, float]:
    """Return the bytes of weights, gradient buckets and optimizer state (Rajbhandari et al., "ZeRO", SC20, table 1). ``ends``: How
    many of the parameters are outside the layers, which AdamW updates beside Muon."""
    step, replicas = cfg.step, cfg.mesh.replicate
    narrow, wide = step.precision == "bf16-params", 8 if step.precision == "fp64" else 4
    shard = shard or (step.shard if replicas > 1 else "none")
    fraction = 1 / ((step.shard_within or replicas) if shard != "none" else 1)
    weight = 2 if narrow and not (trained and shard == "weights") else wide
    sums = 4 if narrow and (step.accumulate > 1 or replicas * cfg.mesh.context > _BF16_SUM_RANKS) else weight
    moment = 2 if step.moments == "bf16" else wide
    moments = _MOMENTS[step.optimizer] - (step.optimizer in ("sgd", "lars") and not step.momentum)
    moment_bytes = wide + moment * (moments - 1) if step.optimizer == "lamb" else moment * moments
    updated, second = count * fraction * trained, ends * fraction * trained * moment if step.optimizer == "muon" else 0.0
    return {
        "weights": weight * count * (fraction if shard == "weights" else 1),
        "gradients": sums * count * trained * {"none": 1.0, "optimizer": 1 + fraction, "weights": fraction}[shard],
        "optimizer": second + updated * (moment_bytes + (wide if weight == 2 else 0)),  # with the master weights
        "average": updated * wide if step.ema_decay is not None else 0.0,
    }


def _micro_batches_in_flight(cfg: Config, rank: int) -> float:
    """Return the maximum number of micro-batches whose activations a rank saves (Narayanan et al., SC21, section 2.2)."""
    p, per_rank, micro_batches = cfg.mesh.pipeline, cfg.stages.per_rank, cfg.step.accumulate
    if p == 1:
        return 1.0
    if cfg.stages.schedule == "gpipe":
        return float(micro_batches)
    if per_rank == 1 or cfg.stages.schedule == "zero-bubble-v":
        return float(min(p - rank * (per_rank == 1), micro_batches))
    turn = micro_batches // max(micro_batches // p, 1)
    ahead = (per_rank - 1) * turn + (1 if cfg.stages.schedule == "zero-bubble" else 2) * (p - 1 - rank)
    return min(ahead + 1, micro_batches * per_rank) / per_rank


def _saved_activations(cfg: Config, tokens: int, recompute: str) -> float:
    """Return the bytes of a layer's activations that are saved for the backward pass."""
    m, n, (hidden, product), local_tokens = cfg.model, cfg.mesh.tensor, _element_bytes(cfg), tokens // cfg.mesh.tensor
    trained, adapted = cfg.lora is None, {name.rpartition(".")[2] for name in (cfg.lora.targets if cfg.lora else ())}
    if recompute == "layers":
        return hidden * m.width * local_tokens
    saved = 2.0 * hidden * m.width * local_tokens
    if recompute != "selective":  # outputs of norms; a frozen layer saves no input unless it is sharded
        saved += product * m.width * local_tokens * sum(trained or n > 1 or not adapted.isdisjoint(names) for names in _AFTER_NORMS)
    varlen = cfg.data.documents == "apart" and product == 2 and cfg.mesh.context == 1
    keys = m.kv_heads * m.head_dim * max(n // m.kv_heads, 1) // n
    saved += tokens * (product * ((2 + varlen) * m.heads * m.head_dim // n + 2 * keys) + 4 * m.heads // n)
    saved += 0 if varlen or cfg.data.documents == "joined" else product * tokens * row_tokens(cfg)  # the mask of attention
    inner = (2 if m.is_gated else 1) + (recompute == "none" and (trained or "down_proj" in adapted))
    saved += inner * tokens * product * m.active_inner // m.layers // n
    if m.experts is not None:  # inputs and outputs of experts, in their order
        saved += 2 * product * tokens * m.experts.top_k * m.width
    if cfg.lora is not None and cfg.lora.dropout:  # the input of A and its dropout mask
        saved += len(adapted) * (product + 1) * m.width * local_tokens
    return saved + 2 * m.width * local_tokens * (m.dropout > 0)


def _layer_backward(cfg: Config, tokens: int) -> float:
    """Return the bytes of temporary tensors in the backward pass of a layer: gradients of its hidden states, those inside a wide
    feed-forward part, or with tensor parallelism those of all tokens, which are gathered and reduced."""
    m, n, (hidden, product) = cfg.model, cfg.mesh.tensor, _element_bytes(cfg)
    inner = product * tokens * m.active_inner // m.layers // n
    first = product * m.width * (tokens + m.inner) // n + inner  # in its last linear layer, with a weight gradient
    within = 2 * inner if m.is_gated else 0
    gathered = 4 * product * m.width * tokens - 2 * inner if n > 1 else 0
    return hidden * m.width * tokens // n + max(first, within, gathered)


def _loss_head(cfg: Config, tokens: int) -> float:
    """Return the bytes of the last norm, and of a chunk of logits with its gradients (hpcai.nn.lm_head)."""
    m, n, (hidden, product) = cfg.model, cfg.mesh.tensor, _element_bytes(cfg)
    wide, vocabulary = max(hidden, 4), -(-m.vocabulary // n)
    chunk, weight = min(tokens, max(_LOGITS // (4 * vocabulary), 1)), vocabulary * m.width
    logits, trained, both = chunk * vocabulary, weight if cfg.lora is None else 0, wide + product * (product != wide)
    final = m.width * (tokens // n * (hidden + product) + tokens * product * (n > 1)) + product * weight * (hidden != product)
    earlier = wide * trained * (tokens > chunk)  # the gradient of the weight by other chunks
    return final + product * m.width * tokens + max(earlier + logits * 2 * wide, logits * product + trained * both)
