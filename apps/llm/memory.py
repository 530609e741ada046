"""What a run of a language model needs of memory and of computation, from its settings alone. No torch here, so that it is told at
once, and on a login node.

    memory.parts(cfg, 64)       # bytes of the fullest of 64 processes, by what they are for
    memory.refuse(cfg, mesh)    # before anything is allocated

What lives is counted as it stands in the code of the layers (hpcai.models.llm); tests compare it with a recording of the step
(hpcai.plan.paper). Korthikanti et al. ("Reducing Activation Recomputation in Large Transformer Models", 2022) count the same for
GPT's layers. Gradients count in full, as in their buckets on a GPU: one CPU process without micro-batches needs somewhat less.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcai.dist.environment import place
from hpcai.errors import LaunchError, MeshError

if TYPE_CHECKING:
    from hpcai.dist import Mesh

Config = Any  # of apps.llm.settings, which imports this module

FULL = 0.92
"""share of the room that tensors of a proposed run may take: fragments and libraries take the rest"""
_LOGITS = 1 << 28  # bytes of float32 logits that a GPU computes at a time (hpcai.kernels.room)
_FEW = 4  # ranks whose gradients are added up in bfloat16 (hpcai.parallel.replicate)
_AGAIN, _SHARDS = ("none", "selective", "layers"), ("none", "optimizer", "weights")  # the more, the slower
_READ, _FED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")  # layers that read a norm's result
_MOMENTS = {"adam": 2, "adamw": 2, "lamb": 3, "sgd": 1, "lars": 1}  # lamb's third is the direction


class Weight(NamedTuple):
    """A parameter of a process: how many numbers."""

    size: int
    ranks: int
    """of a copy, over which its gradients are summed"""
    layer: bool = True
    """of a repeated layer"""
    adapter: bool = False


@dataclass(frozen=True)
class Sizes:
    """A mesh: how many processes along each axis."""

    replicate: int
    tensor: int
    context: int
    pipeline: int

    @classmethod
    def of(cls, cfg: Config, world: int) -> "Sizes":
        """Raises MeshError where the processes cannot be divided so."""
        mesh = cfg.mesh
        within, train = mesh.tensor * mesh.context * mesh.pipeline, world - mesh.evaluate
        if train < within or train % within or mesh.replicate not in (-1, train // within):
            raise MeshError(f"{world} processes cannot be mesh {mesh.model_dump()}: give a multiple of {within}, or other sizes")
        return cls(train // within, mesh.tensor, mesh.context, mesh.pipeline)


def parts(cfg: Config, world: int) -> dict[str, float]:
    """Bytes of the process that needs most, by what they are for; their sum is what lives at the fullest moment, at which the loss
    head or a layer works. ``gathered``: weights that others hold (step.shard=weights). Buffers of CUDA's libraries are not in it.
    """
    sizes = Sizes.of(cfg, world)
    return max((_of(cfg, sizes, rank) for rank in sorted({0, 1, sizes.pipeline - 1} & set(range(sizes.pipeline)))), key=_sum)


def need(cfg: Config, world: int) -> float:
    """Bytes in all."""
    return _sum(parts(cfg, world))


def _sum(found: dict[str, float]) -> float:
    return sum(found.values())


def notes(cfg: Config) -> list[str]:
    """What ``--show`` says beside the settings: memory, parameters, tokens of a step, operations of a token."""
    try:
        found, mesh = place().world or 1, cfg.mesh
    except LaunchError:
        found = 1
    within = mesh.tensor * mesh.context * mesh.pipeline
    world = mesh.evaluate + within * (max((found - mesh.evaluate) // within, 1) if mesh.replicate == -1 else mesh.replicate)
    sizes, tokens = Sizes.of(cfg, world), tokens_of(cfg)
    named = " x ".join(f"{name} {size}" for name, size in vars(sizes).items() if size > 1) or "one copy, not cut"
    every = {name: bytes for name, bytes in parts(cfg, world).items() if bytes}
    width = max(map(len, every))
    told = [f"GB of the process that needs most, of {world} ({named}):"]
    told += [f"  {name:<{width}} {bytes / 1e9:9.3f}" for name, bytes in every.items()]
    told += [f"  {'in all':<{width}} {_sum(every) / 1e9:9.3f}"]
    full, causal = (operations(cfg, tokens, half) for half in (False, True))
    if mesh.replicate == -1 and found == 1:
        told.append("mesh.replicate=N tells of N copies")
    trained = "" if cfg.lora is None else f", {trained_of(cfg):,} of them trained"
    return [
        *told, f"{cfg.model.parameters + (trained_of(cfg) if cfg.lora else 0):,} parameters{trained}",
        f"{cfg.data.batch * tokens:,} tokens a step: {cfg.data.batch} rows of {tokens}",
        f"{full / 1e9:.2f} G multiplications and additions a token, {causal / 1e9:.2f} G where attention looks back alone",
    ]  # fmt: skip


def trained_of(cfg: Config) -> int:
    """How many numbers are trained."""
    one = Sizes(1, 1, 1, 1)
    return cfg.model.parameters if cfg.lora is None else sum(w.size for w in _weights(cfg, one, 0) if w.adapter)


def operations(cfg: Config, tokens: int, causal: bool) -> float:
    """Multiplications and additions of a token, forward and backward: 6 of each number that multiplies it (4 where it is frozen),
    and of each layer 12 of each channel of the heads and each token seen (Narayanan et al., SC21, appendix; NVIDIA's figures count
    attention in full until 2025, then ``causal``)."""
    m = cfg.model
    around = m.vocabulary * m.width * (1 if m.tied else 2) + (0 if m.rotary else m.positions * m.width)
    products = m.parameters - around + m.vocabulary * m.width
    seen = 12 * m.layers * m.heads * m.size * tokens * (0.5 if causal else 1.0)
    return seen + (6 * products if cfg.lora is None else 4 * products + 6 * trained_of(cfg))


# ---- before anything is allocated


def refuse(cfg: Config, mesh: "Mesh", room: float | None = None) -> None:
    """Raise MeshError where a process needs more than ``room`` bytes (by default this machine's), with the nearest change that
    fits: on as many processes, else on the fewest."""
    world, local = mesh.job.size, place().local_world or 1
    room = _room(mesh, local) if room is None else room
    found = parts(cfg, world)
    if _sum(found) <= room:
        return
    largest = sorted(found.items(), key=lambda part: -part[1])[:4]
    named = ", ".join(f"{name} {bytes / 1e9:.3g}" for name, bytes in largest if bytes)
    raise MeshError(
        f"a process needs {_sum(found) / 1e9:.4g} GB, there are {room / 1e9:.4g} ({named}); {_remedy(cfg, world, local, room)}"
    )


def _room(mesh: "Mesh", local: int) -> float:
    """Bytes that a process may have: its GPU's, or its part of what the node has free."""
    if mesh.device.type == "cuda":
        import torch

        return float(torch.cuda.mem_get_info(mesh.device)[1])
    try:
        with open("/proc/meminfo") as file:
            free = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return math.inf
    return 1024.0 * free / local


def _remedy(cfg: Config, world: int, local: int, room: float) -> str:
    node = max(local, 1)
    worlds = (*range(node, 64 * node + 1, node), *(64 * node * 2**k for k in range(1, 8)))
    for processes in (world, *(n for n in worlds if n > world)):
        for words, changed in _changes(cfg, processes, 8 if processes > world and node == 1 else node):
            try:
                needs = need(changed, processes)
            except MeshError:
                continue
            if needs <= FULL * room:
                more = "" if processes == world else f"{processes} processes at least, with "
                return f"take {more}{' '.join(words) or 'the same settings'}: {needs / 1e9:.4g} GB"
    return "no mesh that the model can be cut along fits; take GPUs with more memory, or a smaller batch"


def _changes(cfg: Config, world: int, node: int) -> Iterator[tuple[list[str], Config]]:
    """Settings for ``world`` processes, by what they cost: first those of the step, a cut of the model last."""
    m, step, mesh, tokens = cfg.model, cfg.step, cfg.mesh, tokens_of(cfg)
    shards = _SHARDS[_SHARDS.index(step.shard) :]
    tensors = [n for n in sorted({mesh.tensor, 1, 2, 4, 8}) if n >= mesh.tensor and (n == mesh.tensor or n <= node)]
    pipelines = [n for n in range(mesh.pipeline, m.layers + 1) if m.layers % n == 0 or n == mesh.pipeline]
    again = _AGAIN[_AGAIN.index(m.recompute) :]
    for pipeline, tensor in product(pipelines, tensors):
        within = pipeline * tensor * mesh.context
        copies = (world - mesh.evaluate) // within
        if copies < 1 or (world - mesh.evaluate) % within or m.heads % tensor or max(m.keys, tensor) % min(m.keys, tensor):
            continue
        if m.inner % tensor or tokens % (mesh.context * tensor) or cfg.data.batch % copies:
            continue
        rows = cfg.data.batch // copies
        least = max(step.accumulate, pipeline if pipeline > 1 else 1)
        for parts, recompute, shard in product([n for n in range(least, rows + 1) if rows % n == 0], again, shards):
            if shard != step.shard and copies == 1:
                continue
            new = {
                "step.shard": (step.shard, shard), "model.recompute": (m.recompute, recompute),
                "step.accumulate": (step.accumulate, parts), "mesh.tensor": (mesh.tensor, tensor),
                "mesh.pipeline": (mesh.pipeline, pipeline),
            }  # fmt: skip
            changed = cfg.model_copy(update={
                "step": step.model_copy(update={"shard": shard, "accumulate": parts}),
                "model": m.model_copy(update={"recompute": recompute}),
                "mesh": mesh.model_copy(update={"tensor": tensor, "pipeline": pipeline, "replicate": -1}),
            })  # fmt: skip
            yield [f"{name}={after}" for name, (before, after) in new.items() if before != after], changed


# ---- what lives between steps


def _of(cfg: Config, sizes: Sizes, rank: int) -> dict[str, float]:
    """``parts`` of one rank along the pipeline."""
    own = list(_weights(cfg, sizes, rank))
    found = _held(cfg, sizes, [one for one in own if not one.adapter], trained=cfg.lora is None)
    found["adapters"] = _sum(_held(cfg, sizes, [one for one in own if one.adapter], trained=True))
    head, layer = _gathered(cfg, sizes, own)
    moments = [moment | (layer if "layer" in moment else head) for moment in _moments(cfg, sizes, rank)]
    return found | max(moments, key=_sum)


def _held(cfg: Config, sizes: Sizes, own: list[Weight], trained: bool) -> dict[str, float]:
    """Weights, gradients in their buckets, and the optimizer's numbers (Rajbhandari et al., "ZeRO", SC20, table 1)."""
    step, copies = cfg.step, sizes.replicate
    narrow, wide = step.precision == "bf16-params", 8 if step.precision == "fp64" else 4
    cut = step.shard if copies > 1 else "none"
    share = 1 / ((step.shard_within or copies) if cut != "none" else 1)
    count = sum(one.size for one in own)
    weight = 2 if narrow and not (trained and cut == "weights") else wide
    updated = share if trained else 0.0
    found = {"weights": weight * count * (share if cut == "weights" else 1), "gradients": 0.0}
    for one in own if trained else ():
        sums = 4 if narrow and (step.accumulate > 1 or copies * one.ranks > _FEW) else weight
        found["gradients"] += sums * one.size * {"none": 1.0, "optimizer": 1 + share, "weights": share}[cut]
    moment = 2 if step.moments == "bf16" else wide
    kept = _MOMENTS[step.optimizer] - (step.optimizer in ("sgd", "lars") and not step.momentum)
    every = wide + moment * (kept - 1) if step.optimizer == "lamb" else moment * kept
    found["optimizer"] = count * updated * (every + (wide if weight == 2 else 0))  # with the master weights
    found["average"] = count * updated * wide if step.averages else 0.0
    return found


def _weights(cfg: Config, sizes: Sizes, rank: int) -> Iterator[Weight]:
    """Parameters of a rank along the pipeline: Shoeybi et al. ("Megatron-LM", 2019) say which are cut over ``tensor``."""
    m, n, c, bias = cfg.model, sizes.tensor, cfg.model.width, int(cfg.model.bias)
    alone, within = sizes.context, max(n // m.keys, 1)  # ranks of a head of keys
    whole, norm = alone * n, c * (2 if m.norm == "layer" else 1)
    layers, first, last = _stage(cfg, sizes, rank)
    queries, keys, inner, words = m.heads * m.size // n, m.keys * m.size * within // n, m.inner // n, -(-m.vocabulary // n)
    linears = {"q_proj": (c, queries), "k_proj": (c, keys), "v_proj": (c, keys), "o_proj": (queries, c), "up_proj": (c, inner)}
    linears |= {"down_proj": (inner, c)} | ({"gate_proj": (c, inner)} if m.feed == "swiglu" else {})
    for _ in range(layers):
        yield Weight(norm, whole)
        yield Weight(norm, whole)
        for name, (inputs, outputs) in linears.items():
            shared = within if name in ("k_proj", "v_proj") else 1
            yield Weight(inputs * outputs, alone * shared)
            if bias:
                yield Weight(outputs, whole if name in ("o_proj", "down_proj") else alone * shared)
            if cfg.lora is not None and name in cfg.lora.targets:
                into = name in ("o_proj", "down_proj")  # whose inputs are cut, others' outputs
                yield Weight(cfg.lora.rank * inputs, alone if into else whole, adapter=True)
                yield Weight(cfg.lora.rank * outputs, whole if into else alone * shared, adapter=True)
    tied = 2 if m.tied and sizes.pipeline > 1 else 1  # on the first stage and the last
    if first or (m.tied and last):
        yield Weight(words * c, alone * tied, layer=False)
    if first and m.rotary is None:
        yield Weight(m.positions * c, whole, layer=False)
    if last:
        yield Weight(norm, whole, layer=False)
    if last and not m.tied:
        yield Weight(words * c, alone, layer=False)


def _stage(cfg: Config, sizes: Sizes, rank: int) -> tuple[int, bool, bool]:
    """Layers of a rank along the pipeline, and whether it has the first and the last stage (hpcai.parallel.stages)."""
    count = sizes.pipeline * (cfg.stages.per_rank if sizes.pipeline > 1 else 1)
    fullest = sorted(range(count), key=lambda stage: (stage == count - 1, stage == 0))
    each = [cfg.model.layers // count + (fullest.index(stage) < cfg.model.layers % count) for stage in range(count)]
    own = [stage for stage in range(count) if _rank_of(cfg, sizes, stage) == rank]
    return sum(each[stage] for stage in own), 0 in own, count - 1 in own


def _rank_of(cfg: Config, sizes: Sizes, stage: int) -> int:
    turn, place = divmod(stage, sizes.pipeline)
    return sizes.pipeline - 1 - place if turn % 2 and cfg.stages.schedule == "zero-bubble-v" else place


# ---- what lives while a step goes on


@dataclass(frozen=True)
class _Numbers:
    """Bytes of a number: of the hidden state, of products, of what norms and entropies compute with."""

    hidden: int
    product: int
    wide: int
    cast: bool
    """whether weights are float32 and products bfloat16"""

    @classmethod
    def of(cls, cfg: Config) -> "_Numbers":
        hidden, product = {"fp32": (4, 4), "fp64": (8, 8), "bf16-params": (2, 2)}.get(cfg.step.precision, (4, 2))
        return cls(hidden, product, max(hidden, 4), hidden != product)


def _moments(cfg: Config, sizes: Sizes, rank: int) -> list[dict[str, float]]:
    """What lives beside weights at the moments at which most may live: forward and backward through the head, and backward through
    the last layer."""
    b, m, layers = _Numbers.of(cfg), cfg.model, _stage(cfg, sizes, rank)[0]
    tokens = _rows(cfg, sizes) * tokens_of(cfg) // sizes.context
    kept, entered = (_kept(cfg, sizes, tokens, recompute) for recompute in (m.recompute, "layers"))
    flying = _flying(cfg, sizes, rank)
    held = {"activations": layers * kept * flying}
    copies = b.product * sum(w.size for w in _weights(cfg, sizes, rank) if w.layer) * (b.cast and cfg.step.products != "fp8")
    if sizes.pipeline > 1:  # what comes and goes between stages, for each micro-batch (torch's stages)
        (first, last), own = _stage(cfg, sizes, rank)[1:], cfg.stages.per_rank
        held["messages"] = entered * (cfg.step.accumulate * (2.0 * own - first - last) + flying * (own - last))
    again = _kept(cfg, sizes, tokens, "none") + copies / max(layers, 1) if m.recompute == "layers" else 0.0
    back = held | {"copies": copies if m.recompute != "layers" else 0.0, "layer": _backward(cfg, sizes, tokens) + again}
    if m.tied and sizes.pipeline == 1 and cfg.lora is None:  # the head's gradient waits for that of the embedding
        back["layer"] += -(-m.vocabulary // sizes.tensor) * m.width * (b.hidden if cfg.step.precision == "bf16-params" else b.wide)
    if not _stage(cfg, sizes, rank)[2]:
        return [back]
    forward, backward = _head(cfg, sizes, tokens)
    return [held | {"copies": copies, "head": forward}, held | {"copies": back["copies"], "head": backward}, back]


def tokens_of(cfg: Config) -> int:
    """Tokens of a row: as the data say, or where there are none here as many as the model may have."""
    try:
        return int(json.loads((cfg.data.directory / "text.json").read_bytes())["sequence"])
    except (OSError, ValueError, LookupError, TypeError):
        return cfg.model.positions


def _rows(cfg: Config, sizes: Sizes) -> int:
    return max(cfg.data.batch // (sizes.replicate * cfg.step.accumulate), 1)


def _flying(cfg: Config, sizes: Sizes, rank: int) -> float:
    """Micro-batches whose activations a rank holds at a time, of all its layers: Narayanan et al., SC21, section 2.2."""
    p, each, micro = sizes.pipeline, cfg.stages.per_rank, cfg.step.accumulate
    if p == 1:
        return 1.0
    if cfg.stages.schedule == "gpipe":
        return float(micro)
    if each == 1:
        return float(min(p - rank, micro))
    if cfg.stages.schedule == "zero-bubble-v":
        return float(min(p, micro))
    turn = micro // max(micro // p, 1)
    ahead = (each - 1) * turn + (1 if cfg.stages.schedule == "zero-bubble" else 2) * (p - 1 - rank)
    return min(ahead + 1, micro * each) / each


def _kept(cfg: Config, sizes: Sizes, tokens: int, recompute: str) -> float:
    """Activations of one layer that the backward pass reads."""
    m, n, b, some = cfg.model, sizes.tensor, _Numbers.of(cfg), tokens // sizes.tensor
    trained, adapted = cfg.lora is None, set(cfg.lora.targets if cfg.lora else ())
    if recompute == "layers":
        return b.hidden * m.width * some
    narrow = b.product * m.width * some
    kept = 2.0 * b.hidden * m.width * some
    if recompute != "selective":  # what norms give; a frozen layer keeps no input, one that is cut does
        kept += narrow * sum(trained or n > 1 or not adapted.isdisjoint(names) for names in (_READ, _FED))
    varlen = cfg.data.documents == "apart" and b.product == 2 and sizes.context == 1
    keys = m.keys * m.size * max(n // m.keys, 1) // n
    kept += tokens * (b.product * ((2 + varlen) * m.heads * m.size // n + 2 * keys) + 4 * m.heads // n)
    kept += 0 if varlen or cfg.data.documents == "joined" else b.product * tokens * tokens_of(cfg)  # the mask, as attention has it
    inner = (2 if m.feed == "swiglu" else 1) + (recompute == "none" and (trained or "down_proj" in adapted))
    kept += inner * tokens * b.product * m.inner // n
    if cfg.lora is not None and cfg.lora.dropout:  # what goes into A, and which of it was dropped
        kept += len(adapted) * (b.product + 1) * m.width * some
    return kept + 2 * m.width * some * (m.dropout > 0)


def _backward(cfg: Config, sizes: Sizes, tokens: int) -> float:
    """What backward through a layer makes beside what was kept: gradients of its hidden states, inside its feed-forward part the
    more where it is wide, and where weights are cut those of all tokens, which are gathered and sent."""
    m, n, b = cfg.model, sizes.tensor, _Numbers.of(cfg)
    stream, inner = b.hidden * m.width * tokens // n, b.product * tokens * m.inner // n
    first = b.product * m.width * (tokens + m.inner) // n + inner  # through the last of its layers, with the gradient of a weight
    within = 2 * inner if m.feed == "swiglu" else 0
    gathered = 4 * b.product * m.width * tokens - 2 * inner if n > 1 else 0
    return stream + max(first, within, gathered)


def _head(cfg: Config, sizes: Sizes, tokens: int) -> tuple[float, float]:
    """The last norm, and logits of some tokens at a time, forward and backward (hpcai.nn.head)."""
    m, n, b = cfg.model, sizes.tensor, _Numbers.of(cfg)
    words, some = -(-m.vocabulary // n), tokens // n
    logits, weight = min(tokens, max(_LOGITS // (4 * words), 1)) * words, words * m.width
    at_once = logits * (b.wide + b.product * (b.product != b.wide))
    final = m.width * (some * (b.hidden + b.product) + tokens * b.product * (n > 1)) + b.product * weight * b.cast
    learns = weight if cfg.lora is None else 0
    backward = b.product * m.width * tokens + b.wide * learns + max(at_once, (logits + learns) * b.product)
    return final + at_once, final + backward


def _gathered(cfg: Config, sizes: Sizes, own: list[Weight]) -> tuple[dict[str, float], dict[str, float]]:
    """Weights that others hold (torch's fully_shard): of the layer that works and the next, while the head works of the last one,
    the rest for the whole step; and gradients of a layer on their way to those who hold it."""
    if cfg.step.shard != "weights" or sizes.replicate == 1:
        return {}, {}
    weight, wide = (2 if cfg.step.precision == "bf16-params" else _Numbers.of(cfg).wide), _Numbers.of(cfg).wide
    layers = max(_stage(cfg, sizes, 0)[0], 1)
    layer, rest = (sum(one.size for one in own if one.layer == of) for of in (True, False))
    trained = sum(one.size for one in own if one.layer and (cfg.lora is None or one.adapter))
    passing = (weight + wide) * trained / layers
    head = {"gathered": weight * (rest + layer / layers)}
    return head, {"gathered": weight * (rest + 2 * layer / layers), "buckets": passing}
