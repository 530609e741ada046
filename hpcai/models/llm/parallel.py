"""Parallel language models: heads and channels sharded over ``tensor``, tokens over ``context``, layers over ``pipeline``.

With ``tensor``, activations between two sharded layers are sharded along tokens over the same ranks (sequence parallelism), so that
nothing is computed twice.
"""

from typing import Any

from torch import Tensor

from hpcai.dist.mesh import Mesh
from hpcai.errors import MeshError
from hpcai.models.llm.model import LLM
from hpcai.parallel.axial import AxisSeam
from hpcai.parallel.context import ContextParallelAttention, ContextSum, LocalChunk
from hpcai.parallel.data_parallel import sum_gradients_over
from hpcai.parallel.pipeline import Pipeline
from hpcai.parallel.tensor import column_parallel, row_parallel, vocab_parallel_embedding, vocab_parallel_head


def parallelize(model: LLM, mesh: Mesh) -> LLM:
    """Shard ``model`` over ``tensor`` and ``context``, in place. Raises MeshError if the mesh does not fit."""
    mesh.check_axes("LLM", "replicate", "tensor", "context", "pipeline")
    tensor, context, cfg = mesh["tensor"], mesh["context"], model.cfg
    layers: Any = model.model.layers
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
            attention, feed = layer.self_attn, layer.mlp
            outputs = [attention.q_proj, feed.up_proj, *([feed.gate_proj] if cfg.feed == "swiglu" else [])]
            for linear in outputs:
                column_parallel(linear, tensor, sequence=1)
            for linear in (attention.k_proj, attention.v_proj):
                column_parallel(linear, tensor, sequence=1, groups=groups)
            for linear in (attention.o_proj, feed.down_proj):
                row_parallel(linear, tensor, sequence=1)
        vocab_parallel_head(model.lm_head, tensor, sequence=1)
        sum_gradients_over(model, tensor)
    if context.size > 1:
        model.local_tokens, model.all_reduce = LocalChunk(context, 1), ContextSum(context)
        for layer in layers:
            layer.self_attn.core_attention = ContextParallelAttention(context, regather=cfg.recompute != "layers")
        sum_gradients_over(model, context)
    return model


def build_pipeline(model: LLM, mesh: Mesh, **kwargs: Any) -> Pipeline | None:
    """Split the layers of ``model`` over ``pipeline``, and return the ``Pipeline`` for ``Step(..., pipeline=)``; None if it is 1.
    ``kwargs``: schedule and sizes of ``Pipeline``."""
    if mesh["pipeline"].size == 1:
        return None
    first = ["model.embed_tokens", *(["model.add_positions"] if model.cfg.rotary is None else [])]
    return Pipeline(model, mesh, blocks="model.layers", first=first, last=("model.norm", "lm_head"), **kwargs)


class _LocalTokens(AxisSeam):
    """Take the tokens of this rank from those of all ranks.   [B, T, C] -> [B, T/n, C]"""

    sequence: int | None = 1

    def forward(self, x: Tensor, *sizes: int) -> Tensor:
        return x if self.sequence is None else x.chunk(self.axis.size, 1)[self.axis.rank]
