"""Parallel BERT: attention heads, channels of feed-forward layers and the vocabulary sharded over ``tensor``."""

from typing import Any, cast

from hpcai.dist.mesh import Mesh
from hpcai.errors import MeshError
from hpcai.models.bert.model import Bert
from hpcai.parallel.axial import AllGather
from hpcai.parallel.tensor import column_parallel, row_parallel, vocab_parallel_embedding, vocab_parallel_head


def parallelize(model: Bert, mesh: Mesh) -> Bert:
    """Shard ``model`` over ``tensor``, in place, and return it. Raises MeshError if the mesh does not fit."""
    mesh.check_axes("BERT", "replicate", "tensor")
    tensor, bert = mesh["tensor"], cast(Any, model.bert)
    if model.cfg.heads % tensor.size:
        raise MeshError(f"mesh.tensor is {tensor.size}, which does not divide {model.cfg.heads} heads; take a divisor of them")
    vocab_parallel_embedding(bert.embeddings.word_embeddings, tensor)
    vocab_parallel_head(model.cls["predictions"], tensor)  # type: ignore[arg-type]
    for layer in bert.encoder["layer"]:
        attention = layer.attention
        attention.self.every_head = AllGather(tensor, 1) if tensor.size > 1 else attention.self.every_head
        for linear in (attention.self.query, attention.self.key, attention.self.value, layer.intermediate["dense"]):
            column_parallel(linear, tensor)
        for linear in (attention.output.dense, layer.output.dense):
            row_parallel(linear, tensor)
    return model
