"""Parallel language models: heads and channels sharded over ``tensor``, tokens over ``context``, layers over ``pipeline``.

With ``tensor``, activations between two sharded layers are sharded along tokens over the same ranks (sequence parallelism), so that
nothing is computed twice.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai.dist.collectives import all_reduce
from hpcai.dist.mesh import Axis, Mesh
from hpcai.errors import MeshError
from hpcai.models.llm.model import LLM, MLP, Attention, GatedMLP, LatentAttention
from hpcai.nn.lm_head import LMHead
from hpcai.nn.moe import MoE
from hpcai.parallel.axial import AllGather, AxisSeam
from hpcai.parallel.context import ContextParallelAttention, ContextSum, LocalChunk
from hpcai.parallel.data_parallel import sum_gradients_over
from hpcai.parallel.expert import expert_parallel, tensor_parallel_experts
from hpcai.parallel.pipeline import Pipeline
from hpcai.parallel.sharding import shard_
from hpcai.parallel.tensor import column_parallel, row_parallel, vocab_parallel_embedding, vocab_parallel_head


def parallelize(model: LLM, mesh: Mesh) -> LLM:
    """Shard ``model`` over ``tensor`` and ``context``, in place. Raises MeshError if the mesh does not fit."""
    mesh.check_axes("LLM", "replicate", "expert", "tensor", "context", "pipeline")
    tensor, context, cfg = mesh["tensor"], mesh["context"], model.cfg
    layers: list[Any] = [*model.model.layers, *(() if model.model.mtp is None else model.model.mtp.layers)]
    if cfg.heads % tensor.size:
        raise MeshError(f"mesh.tensor is {tensor.size}, which does not divide {cfg.heads} heads; take a divisor of them")
    groups = mesh.split("tensor", tensor.size // cfg.kv_heads, "mesh.tensor") if tensor.size > cfg.kv_heads else None
    if groups is None and cfg.kv_heads % tensor.size:
        raise MeshError(f"mesh.tensor is {tensor.size}, which neither divides {cfg.kv_heads} KV heads nor is a multiple of them")
    if tensor.size > 1:
        vocab_parallel_embedding(model.model.embed_tokens, tensor, sequence=1)
        if model.model.add_positions is not None:
            model.model.add_positions.local_tokens = _LocalTokens(tensor)
        for layer in layers:
            _shard_attention(layer.self_attn, tensor, groups)
            if isinstance(layer.mlp, MoE):
                tensor_parallel_experts(layer.mlp, tensor, sequence=1)
            for feed in layer.mlp.modules():
                if isinstance(feed, GatedMLP | MLP):
                    for linear in (feed.up_proj, *([feed.gate_proj] if isinstance(feed, GatedMLP) else [])):
                        column_parallel(linear, tensor, sequence=1)
                    row_parallel(feed.down_proj, tensor, sequence=1)
        if isinstance(model.lm_head, LMHead):
            vocab_parallel_head(model.lm_head, tensor, sequence=1)
        else:
            model.lm_head.all_values = _AllValues(tensor)
        sum_gradients_over(model, tensor)
    if context.size > 1:
        model.local_tokens, model.all_reduce = LocalChunk(context, 1), ContextSum(context)
        for layer in layers:
            attention = layer.self_attn
            attention.core_attention = ContextParallelAttention(context, cfg.recompute != "layers", attention.core_attention)
        sum_gradients_over(model, context)
    if mesh.sizes["expert"] > 1 and cfg.experts is None:
        raise MeshError(f"mesh.expert is {mesh.sizes['expert']}, but the model has no experts; set it to 1, or model.experts")
    for layer in layers:
        if isinstance(layer.mlp, MoE):
            expert_parallel(layer.mlp, mesh)
    return model


def _shard_attention(attention: Attention, tensor: Axis, groups: tuple[Axis, Axis] | None) -> None:
    over, within = groups or (tensor, Axis("none"))
    for name in ("q_proj", "q_b_proj", "kv_b_proj"):
        if hasattr(attention, name):
            column_parallel(getattr(attention, name), tensor, sequence=1)
    for name in ("k_proj", "v_proj"):
        if hasattr(attention, name):
            column_parallel(getattr(attention, name), tensor, sequence=1, groups=groups)
    row_parallel(attention.o_proj, tensor, sequence=1)
    if attention.sinks is not None:
        shard_(attention.sinks, 0, tensor)
    if attention.qk_norm == "all":
        attention.q_norm, attention.k_norm = _ShardedRMSNorm(attention.q_norm, tensor), _ShardedRMSNorm(attention.k_norm, over)
        sum_gradients_over(attention.k_norm, within)
    if isinstance(attention, LatentAttention):
        attention.all_tokens = _AllTokens(tensor, dim=1)


def build_pipeline(model: LLM, mesh: Mesh, **kwargs: Any) -> Pipeline | None:
    """Split the layers of ``model`` over ``pipeline``, and return the ``Pipeline`` for ``Step(..., pipeline=)``; None if it is 1.
    ``kwargs``: schedule and sizes of ``Pipeline``."""
    if mesh["pipeline"].size == 1:
        return None
    first = ["model.embed_tokens", *(["model.add_positions"] if model.cfg.rotary is None else [])]
    last = ["model.norm", "lm_head", *(["model.mtp"] if model.cfg.mtp_layers else [])]
    return Pipeline(model, mesh, blocks="model.layers", first=first, last=last, **kwargs)


class _ShardedRMSNorm(nn.Module):
    """RMS normalisation over channels that are sharded.   [..., C/n] -> [..., C/n]"""

    def __init__(self, norm: Any, axis: Axis) -> None:
        super().__init__()
        self.axis, self.eps, self.zero_centered, self.weight = axis.init_group(), norm.eps, norm.zero_centered, norm.weight
        shard_(self.weight, 0, axis)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = all_reduce(wide.square().sum(-1, keepdim=True), self.axis) / (x.shape[-1] * self.axis.size)
        return (wide * torch.rsqrt(mean + self.eps) * (self.weight + int(self.zero_centered))).to(x.dtype)


class _AllTokens(AllGather):
    """Gather the tokens of all ranks; the gradient is reduce-scattered.   [B, T/n, C] -> [B, T, C]"""

    sequence: int | None = 1

    def forward(self, x: Tensor, *sizes: int) -> Tensor:
        return x if self.sequence is None else super().forward(x, x.shape[1] * self.axis.size)


class _AllValues(AxisSeam):
    """Gather the values of the tokens of all ranks, which compute the same loss from them: it counts once.   [B, T/n] -> [B, T]"""

    sequence: int | None = 1

    def forward(self, x: Tensor, *sizes: int) -> Tensor:
        if self.sequence is None:
            return x
        before, tokens = self.axis.rank * x.shape[1], self.axis.size * x.shape[1]
        return all_reduce(F.pad(x, (before, tokens - before - x.shape[1])), self.axis, identity_backward=True)


class _LocalTokens(AxisSeam):
    """Take the tokens of this rank from those of all ranks.   [B, T, C] -> [B, T/n, C]"""

    sequence: int | None = 1

    def forward(self, x: Tensor, *sizes: int) -> Tensor:
        return x if self.sequence is None else x.chunk(self.axis.size, 1)[self.axis.rank]
