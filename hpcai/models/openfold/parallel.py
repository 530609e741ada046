"""Data parallelism of OpenFold, and sharding of a protein over the mesh axis ``axial``.

Alignments are sharded by sequences, then by residues; pairs by rows, by columns in column attention, and the products of triangles
by channels, so that no operand of a product is gathered. Pairs are never gathered, from the embedders to the structure module,
whose attention is sharded by rows too. Computations per residue, and the losses, are replicated on all ranks.
"""

from hpcai.dist.mesh import Mesh
from hpcai.errors import MeshError
from hpcai.models.openfold.attention import RowAttention, TriangleAttention
from hpcai.models.openfold.embedders import ExtraMSAEmbedder, InputEmbedder, RecyclingEmbedder, TemplateEmbedder
from hpcai.models.openfold.evoformer import EvoformerBlock, EvoformerStack, OuterProductMean, PairStack, TriangleMultiplication
from hpcai.models.openfold.heads import Heads
from hpcai.models.openfold.model import OpenFold
from hpcai.models.openfold.structure import InvariantPointAttention
from hpcai.nn.seam import Seam
from hpcai.parallel.axial import AllGather, AllToAll, ChannelsToRows, LocalSlice, ReplicatedOnce, RowsToChannels
from hpcai.parallel.data_parallel import sum_gradients_over


def parallelize(model: OpenFold, mesh: Mesh) -> OpenFold:
    """Shard ``model`` over ``axial``, in place, and return it. Raises MeshError if the mesh does not fit."""
    mesh.check_axes("OpenFold", "replicate", "axial")
    axis = mesh["axial"]
    if axis.size == 1:
        return model
    axis.init_group()
    for name, part in model.named_modules():
        if isinstance(part, TriangleMultiplication):
            if (channels := part.linear_z.in_features) % axis.size:
                advice = "take a divisor of them"
                raise MeshError(f"mesh.axial is {axis.size}, which does not divide the {channels} channels of {name}; {advice}")
            part.to_channels, part.to_rows = RowsToChannels(axis), ChannelsToRows(axis)
        elif isinstance(part, (EvoformerBlock, PairStack)):
            part.to_columns, part.to_rows = AllToAll(axis, 2, 1), AllToAll(axis, 1, 2)
        elif isinstance(part, (RowAttention, TriangleAttention)):
            part.gather_bias = AllGather(axis, 2)
        elif isinstance(part, OuterProductMean):
            part.gather_residues = AllGather(axis, 2)
        if isinstance(part, (OpenFold, InputEmbedder, RecyclingEmbedder, InvariantPointAttention)):
            part.local_rows = LocalSlice(axis, 1)
        if isinstance(part, TemplateEmbedder):
            part.local_rows = LocalSlice(axis, 2)
        if isinstance(part, (OpenFold, EvoformerStack, ExtraMSAEmbedder)):
            part.local_sequences = LocalSlice(axis, 1)
        if isinstance(part, EvoformerStack):
            part.local_columns = LocalSlice(axis, 2)
        if isinstance(part, (OpenFold, InvariantPointAttention, Heads)):
            part.gather_rows = AllGather(axis, 1)
        if isinstance(part, Heads):
            part.gather_columns = AllGather(axis, 2)
    for last in (model.extra_msa_stack.blocks[-1], model.evoformer.blocks[-1]):
        last.to_rows = Seam()  # only the first sequence is used, sharded by residues
    model.replicated_output = ReplicatedOnce(axis)
    sum_gradients_over(model, axis)
    return model
