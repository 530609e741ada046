"""Tensor parallelism: linear layers, embeddings and heads train, and are checkpointed, as unsharded ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpcai.dist.mesh import Mesh
from hpcai.nn.lm_head import LMHead
from hpcai.parallel import tensor
from hpcai.parallel.tensor import column_parallel, row_parallel, vocab_parallel_embedding, vocab_parallel_head
from tests.ranks.language_model import check_reshard, check_sharded_equals_full, new_step, with_shard
from tests.ranks.launch import on_ranks
from tests.ranks.training import Case

CASES: list[Case] = [
    {"model": "tied", "optimizer": "lamb"}, {"model": "gpt", "packed": True}, {"model": "llama", "adapted": True},
    {"model": "one key", "optimizer": "sgd"}, {"model": "one key", "optimizer": "muon"},
]  # fmt: skip


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"tensor": 4}, {"replicate": 2, "tensor": 2}], ids=str)
def test_sharded_equals_unsharded(axes: dict[str, int]) -> None:
    """The models use sequence parallelism; test_diffusion_transformers.py tests tensor parallelism without it."""
    extra = [sharded for case in (CASES[0], CASES[4]) for sharded in with_shard(case, "optimizer", "weights")]
    check_sharded_equals_full(axes, CASES + extra if "replicate" in axes else CASES)


def test_a_checkpoint_loads_on_every_mesh(tmp_path: Path) -> None:
    both = {"replicate": 2, "tensor": 2}
    layouts = [({}, "none"), ({"tensor": 4}, "none"), (both, "optimizer"), (both, "weights")]
    check_reshard([(axes, {"model": "tied", "shard": shard}) for axes, shard in layouts], tmp_path)


def compare_layers(mesh: Mesh) -> None:
    """Compare single layers with full ones; the computation after them is replicated."""
    axis = mesh["tensor"]
    n, rank = axis.size, axis.rank

    def shard(x: Tensor, parts: list[int], dim: int) -> Tensor:
        return torch.cat([part.narrow(dim, p * rank // n, p * (rank + 1) // n - p * rank // n)
                          for p, part in zip(parts, x.split(parts, dim))], dim)  # fmt: skip

    for parts in ([7], [6, 4, 5]):
        full, linear = (nn.Linear(5, sum(parts)).double() for _ in range(2))
        linear.load_state_dict(full.state_dict())
        column_parallel(linear, axis, parts)
        x = torch.randn(3, 2, 5).double()
        a, b = (x.clone().requires_grad_() for _ in range(2))
        y, expected = linear(a), full(b)
        torch.testing.assert_close(y, shard(expected, parts, -1), rtol=0, atol=1e-12)
        y.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-12)
        for name in ("weight", "bias"):
            gradients = getattr(linear, name).grad, shard(getattr(full, name).grad, parts, 0)
            torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)
    assert torch.equal(mesh.background_copy(linear)(x), linear(x)), "a copy that is evaluated during the training"
    with torch.device("meta"):
        deferred = nn.Linear(8, 3)
    row_parallel(deferred, axis)
    assert deferred.weight.is_meta and deferred.weight.shape == (3, 8 // n)
    for padding in (None, 0, 8):
        full, embedding = (nn.Embedding(9, 3, padding).double() for _ in range(2))
        embedding.load_state_dict(full.state_dict())
        vocab_parallel_embedding(embedding, axis)
        tokens = torch.randint(0, 9, (4, 6))
        y, expected = embedding(tokens), full(tokens)
        assert torch.equal(y, expected)
        (y.square() + y).sum().backward(), (expected.square() + expected).sum().backward()
        torch.testing.assert_close(embedding.weight.grad, shard(full.weight.grad, [9], 0), rtol=0, atol=1e-12)
    if n > 1:  # torch's own layer aborts
        assert embedding(torch.tensor([0, 9, -1, 8])).isnan().all(1).tolist() == [False, True, True, False]
    with torch.no_grad():  # as in an evaluation
        assert torch.equal(embedding(tokens), full(tokens))
    full, head = (LMHead(5, 9, softcap=0.7, z_loss=0.1).double() for _ in range(2))
    head.load_state_dict(full.state_dict())
    vocab_parallel_head(head, axis)
    targets = torch.tensor([[0, 8], [-1, 4], [2, 7]])
    for total in (Tensor.sum, lambda y: y.square().sum()):  # one upstream gradient, and one of each token
        da, dweight = torch.autograd.grad(total(head(a, targets)), (a, head.weight))
        db, expected = torch.autograd.grad(total(full(b, targets)), (b, full.weight))
        torch.testing.assert_close((da, dweight), (db, shard(expected, [9], 0)), rtol=0, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(head(a), full(b), rtol=0, atol=1e-12)
        torch.testing.assert_close(head.eval()(a, targets), full.eval()(b, targets), rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_sharded_layers_equal_full_layers(n: int) -> None:
    on_ranks({"tensor": n}, compare_layers)


class OpRecorder(TorchDispatchMode):
    """Records the operations of torch in order, and refuses reads of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal"), f"a step reads the device: {name}"
        self.ops.append(name)
        return function(*args, **(kwargs or {}))


def backward_order(mesh: Mesh, sequence: bool) -> tuple[list[str], list[int]]:
    """Return the operations of the backward pass of a layer, and the sizes of its saved tensors."""
    linear, saved, recorder = nn.Linear(6, 4), list[int](), OpRecorder()
    column_parallel(linear, mesh["tensor"], sequence=1 if sequence else None)
    start, wait = tensor._start_reduce, tensor.Work.wait
    patch = pytest.MonkeyPatch()
    patch.setattr(tensor, "_start_reduce", lambda *args: (start(*args), recorder.ops.append("start"))[0])
    patch.setattr(tensor.Work, "wait", lambda self: (recorder.ops.append("wait"), wait(self))[1])
    x = torch.randn(2, 5, 6, requires_grad=True)
    with patch.context(), torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.numel()), t)[1], lambda t: t):
        y = linear(x).sum()
        with recorder:
            y.backward()
        patch.undo()
    return [name for name in recorder.ops if name in ("mm", "start", "wait")], saved


@pytest.mark.parametrize("sequence", [False, True], ids=["full", "sequence"])
def test_grad_input_is_reduced_during_grad_weight_and_only_local_tokens_are_saved(sequence: bool) -> None:
    for ops, saved in on_ranks({"tensor": 2}, backward_order, sequence):
        assert ops == ["wait"] * sequence + ["mm", "start"] + ["wait"] * sequence + ["mm", "wait"], "gathered again meanwhile"
        assert max(saved) == 2 * 5 * 6, "the local input"


def compiled(mesh: Mesh) -> tuple[int, float]:
    """Return the number of graphs of a compiled layer, and the largest difference to the eager one."""
    layer, graphs = new_step(mesh, {"model": "llama"}).model.model.layers[0], list[Any]()  # type: ignore[union-attr, index]
    rotary = (torch.ones(1, 8, 4).double(), torch.zeros(1, 8, 4).double())
    inputs = torch.randn(2, 4, 16).double(), (rotary, rotary)
    torch._dynamo.reset()
    y = torch.compile(layer, backend=lambda graph, _: (graphs.append(graph), graph.forward)[1])(*inputs)
    return len(graphs), (y - layer(*inputs)).abs().max().item()


def test_a_compiled_layer_has_one_graph_break_per_collective() -> None:
    for graphs, difference in on_ranks({"tensor": 2}, compiled):
        assert graphs == 5, "before, between and after four collectives"
        assert difference < 1e-12
