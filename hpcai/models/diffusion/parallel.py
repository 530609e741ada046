"""A diffusion model over the mesh: copies of any network; heads of DiT and Flux, and channels of their feed-forward parts, cut over
``tensor``.

All ranks along ``tensor`` have all tokens between layers, and modulations whole, which they compute alike.
"""

from typing import Any, TypeVar

from hpcai.dist.mesh import Mesh
from hpcai.errors import MeshError
from hpcai.models.diffusion.dit import DiT
from hpcai.models.diffusion.flux import Flux, Single
from hpcai.models.diffusion.model import Diffusion
from hpcai.models.diffusion.unet import UNet
from hpcai.nn.rmsnorm import RMSNorm
from hpcai.parallel.replicate import sum_over
from hpcai.parallel.tensor import cut_inputs, cut_outputs

Model = TypeVar("Model", Diffusion, DiT, Flux)
_OUTPUTS = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "proj_mlp", "net.0.proj")
_INPUTS = ("to_out.0", "to_add_out", "net.2")


def parallelize(model: Model, mesh: Mesh) -> Model:
    """``model``, or its network alone, in place, cut over ``tensor``. Raises MeshError for a mesh that does not fit."""
    network: Any = model.network if isinstance(model, Diffusion) else model
    if isinstance(network, UNet):
        mesh.only("UNet", "replicate")
        return model
    mesh.only(type(network).__name__, "replicate", "tensor")
    tensor, cfg = mesh["tensor"], network.cfg
    if cfg.heads % tensor.size:
        raise MeshError(f"mesh.tensor is {tensor.size}, which does not divide {cfg.heads} heads; take a divisor of them")
    for name, part in network.named_modules():
        if name.endswith(_OUTPUTS):
            cut_outputs(part, tensor)
        elif name.endswith(_INPUTS):
            cut_inputs(part, tensor)
        elif isinstance(part, Single):  # its last layer reads attention beside a feed-forward part
            cut_inputs(part.proj_out, tensor, parts=(cfg.width, 4 * cfg.width))
        elif isinstance(part, RMSNorm):  # of some of the heads
            sum_over(part, tensor)
    return model
