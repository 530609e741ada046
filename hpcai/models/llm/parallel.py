"""A language model over the mesh: heads and channels cut over ``tensor``, tokens over ``context``, layers over ``pipeline``.

With ``tensor`` what lies between two cut layers has its tokens cut over the same processes, so that nothing is computed twice.
"""

from typing import Any

from torch import Tensor

from hpcai.dist.mesh import Axis, Mesh
from hpcai.errors import MeshError
from hpcai.models.llm.model import LLM
from hpcai.nn.seam import Seam
from hpcai.parallel.context import CausalContext, Own, Total
from hpcai.parallel.pipeline import Pipeline
from hpcai.parallel.replicate import sum_over
from hpcai.parallel.tensor import cut_head, cut_inputs, cut_outputs, cut_words


def parallelize(model: LLM, mesh: Mesh) -> LLM:
    """``model``, in place, cut over ``tensor`` and ``context``. Raises MeshError for a mesh that does not fit."""
    mesh.check_axes("LLM", "replicate", "tensor", "context", "pipeline")
    tensor, context, cfg = mesh["tensor"], mesh["context"], model.cfg
    layers: Any = model.model.layers
    if cfg.heads % tensor.size:
        raise MeshError(f"mesh.tensor is {tensor.size}, which does not divide {cfg.heads} heads; take a divisor of them")
    keys = mesh.split("tensor", tensor.size // cfg.keys, "mesh.tensor") if tensor.size > cfg.keys else None
    if keys is None and cfg.keys % tensor.size:
        raise MeshError(f"mesh.tensor is {tensor.size}, which neither divides {cfg.keys} heads of keys nor is a multiple of them")
    if tensor.size > 1:
        cut_words(model.model.embed_tokens, tensor, sequence=1)
        if model.model.add_positions is not None:
            model.model.add_positions.own = _Own(tensor)
        for layer in layers:
            attention, feed = layer.self_attn, layer.mlp
            outputs = [attention.q_proj, feed.up_proj, *([feed.gate_proj] if cfg.feed == "swiglu" else [])]
            for linear in outputs:
                cut_outputs(linear, tensor, sequence=1)
            for linear in (attention.k_proj, attention.v_proj):
                cut_outputs(linear, tensor, sequence=1, groups=keys)
            for linear in (attention.o_proj, feed.down_proj):
                cut_inputs(linear, tensor, sequence=1)
        cut_head(model.lm_head, tensor, sequence=1)
        sum_over(model, tensor)
    if context.size > 1:
        model.own, model.total = Own(context, 1), Total(context)
        for layer in layers:
            layer.self_attn.attend = CausalContext(context, again=cfg.recompute != "layers")
        sum_over(model, context)
    return model


def stages(model: LLM, mesh: Mesh, **words: Any) -> Pipeline | None:
    """What goes through the layers of ``model`` where they are cut over ``pipeline``, for ``Step(..., act=)``; None elsewhere.
    ``words``: schedule and sizes, as ``Pipeline`` has them."""
    if mesh["pipeline"].size == 1:
        return None
    first = ["model.embed_tokens", *(["model.add_positions"] if model.cfg.rotary is None else [])]
    return Pipeline(model, mesh, blocks="model.layers", first=first, last=("model.norm", "lm_head"), **words)


class _Own(Seam):
    """This rank's tokens of those that all ranks have.   [B, T, C] -> [B, T/n, C]"""

    sequence: int | None = 1

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor, *sizes: int) -> Tensor:
        return x if self.sequence is None else x.chunk(self.axis.size, 1)[self.axis.rank]
