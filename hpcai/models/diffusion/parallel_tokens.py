"""DiT and Flux over the mesh: heads, and channels of feed-forward parts, cut over ``tensor``.

All ranks along it have all tokens between layers, and modulations whole, which they compute alike.
"""

from typing import TypeVar

from hpcai.dist.mesh import Mesh
from hpcai.errors import MeshError
from hpcai.models.diffusion.dit import DiT
from hpcai.models.diffusion.flux import Flux, Single
from hpcai.nn.rmsnorm import RMSNorm
from hpcai.parallel.replicate import sum_over
from hpcai.parallel.tensor import cut_inputs, cut_outputs

Network = TypeVar("Network", DiT, Flux)
_OUTPUTS = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "proj_mlp", "net.0.proj")
_INPUTS = ("to_out.0", "to_add_out", "net.2")


def parallelize(model: Network, mesh: Mesh) -> Network:
    """``model``, in place, cut over ``tensor``. Raises MeshError for a mesh that does not fit."""
    mesh.only(type(model).__name__, "replicate", "tensor")
    tensor, cfg = mesh["tensor"], model.cfg
    if cfg.heads % tensor.size:
        raise MeshError(f"mesh.tensor is {tensor.size}, which does not divide {cfg.heads} heads; take a divisor of them")
    for name, part in model.named_modules():
        if name.endswith(_OUTPUTS):
            cut_outputs(part, tensor)
        elif name.endswith(_INPUTS):
            cut_inputs(part, tensor)
        elif isinstance(part, Single):  # its last layer reads attention beside a feed-forward part
            cut_inputs(part.proj_out, tensor, parts=(cfg.width, 4 * cfg.width))
        elif isinstance(part, RMSNorm):  # of some of the heads
            sum_over(part, tensor)
    return model
