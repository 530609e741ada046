"""Linear layers, embeddings and heads that are cut over ``tensor``: the same training as with whole ones, the same checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpcai.dist.mesh import Mesh
from hpcai.parallel import tensor
from hpcai.parallel.tensor import cut_inputs, cut_outputs, cut_words
from tests.ranks.language_model import checkpoints_go_round, cut_equals_whole, new_step, sharded
from tests.ranks.launch import on_ranks
from tests.ranks.training import Case

CASES: list[Case] = [
    {"model": "tied", "optimizer": "lamb"}, {"model": "gpt", "packed": True}, {"model": "llama", "adapted": True},
    {"model": "one key", "optimizer": "sgd"},
]  # fmt: skip


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"tensor": 4}, {"replicate": 2, "tensor": 2}], ids=str)
def test_cut_equals_whole(axes: dict[str, int]) -> None:
    """Tokens between the layers are cut too; layers by themselves, without that, are in test_diffusion_transformers.py."""
    more = [*sharded(CASES[0], "optimizer", "weights"), *sharded(CASES[3], "optimizer", "weights")] if "replicate" in axes else []
    cut_equals_whole(axes, CASES + more)


def test_a_checkpoint_goes_from_each_cut_to_the_next(tmp_path: Path) -> None:
    both = {"replicate": 2, "tensor": 2}
    places = [({}, "none"), ({"tensor": 2}, "none"), ({"tensor": 4}, "none"), (both, "optimizer"), (both, "weights")]
    checkpoints_go_round([(axes, {"model": "tied", "shard": shard}) for axes, shard in places], tmp_path)


def layers(mesh: Mesh) -> None:
    """Layers by themselves, each beside one that is whole; what follows is the same on all ranks."""
    axis = mesh["tensor"]
    n, rank = axis.size, axis.rank

    def own(x: Tensor, parts: list[int], dim: int) -> Tensor:
        return torch.cat([part.narrow(dim, p * rank // n, p * (rank + 1) // n - p * rank // n)
                          for p, part in zip(parts, x.split(parts, dim))], dim)  # fmt: skip

    for parts in ([7], [6, 4, 5]):
        whole, linear = (nn.Linear(5, sum(parts)).double() for _ in range(2))
        linear.load_state_dict(whole.state_dict())
        cut_outputs(linear, axis, parts)
        x = torch.randn(3, 2, 5).double()
        a, b = (x.clone().requires_grad_() for _ in range(2))
        y, right = linear(a), whole(b)
        torch.testing.assert_close(y, own(right, parts, -1), rtol=0, atol=1e-12)
        y.square().sum().backward()
        right.square().sum().backward()
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-12)
        for name in ("weight", "bias"):
            gradients = getattr(linear, name).grad, own(getattr(whole, name).grad, parts, 0)
            torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)
    assert torch.equal(mesh.beside(linear)(x), linear(x)), "a copy that is evaluated beside the training"
    with torch.device("meta"):
        far = nn.Linear(8, 3)
    cut_inputs(far, axis)
    assert far.weight.is_meta and far.weight.shape == (3, 8 // n)
    for padding in (None, 0, 8):
        whole, embedding = (nn.Embedding(9, 3, padding).double() for _ in range(2))
        embedding.load_state_dict(whole.state_dict())
        cut_words(embedding, axis)
        words = torch.randint(0, 9, (4, 6))
        y, right = embedding(words), whole(words)
        assert torch.equal(y, right)
        (y.square() + y).sum().backward(), (right.square() + right).sum().backward()
        torch.testing.assert_close(embedding.weight.grad, own(whole.weight.grad, [9], 0), rtol=0, atol=1e-12)
    if n > 1:  # torch's own layer ends the process
        assert embedding(torch.tensor([0, 9, -1, 8])).isnan().all(1).tolist() == [False, True, True, False]
    with torch.no_grad():  # as in an evaluation
        assert torch.equal(embedding(words), whole(words))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_layers_that_are_cut_are_those_that_are_whole(n: int) -> None:
    on_ranks({"tensor": n}, layers)


class Watched(TorchDispatchMode):
    """What torch does, in order; reads of the device are refused."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal"), f"a step reads the device: {name}"
        self.done.append(name)
        return function(*args, **(kwargs or {}))


def order(mesh: Mesh, sequence: bool) -> tuple[list[str], list[int]]:
    """What the backward pass of a layer does, and the sizes of the tensors that its forward pass kept."""
    linear, kept, watch = nn.Linear(6, 4), list[int](), Watched()
    cut_outputs(linear, mesh["tensor"], sequence=1 if sequence else None)
    started, waited = tensor._Summing.__init__, tensor._Summing.wait
    patch = pytest.MonkeyPatch()
    patch.setattr(tensor._Summing, "__init__", lambda *words: (started(*words), watch.done.append("start"))[0])
    patch.setattr(tensor._Summing, "wait", lambda self: (watch.done.append("wait"), waited(self))[1])
    x = torch.randn(2, 5, 6, requires_grad=True)
    with patch.context(), torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.numel()), t)[1], lambda t: t):
        y = linear(x).sum()
        with watch:
            y.backward()
        patch.undo()
    return [name for name in watch.done if name in ("mm", "start", "wait")], kept


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_a_gradient_travels_while_that_of_the_weight_is_computed_and_only_own_tokens_are_kept(sequence: bool) -> None:
    for done, kept in on_ranks({"tensor": 2}, order, sequence):
        assert done == ["mm", "start", "mm", "wait"]
        assert max(kept) == 2 * 5 * 6, "the input as it came"


def compiled(mesh: Mesh) -> tuple[int, float]:
    """Graphs of a compiled layer, and the greatest difference that compiling makes."""
    layer, graphs = new_step(mesh, {"model": "llama"}).model.model.layers[0], list[Any]()  # type: ignore[union-attr, index]
    inputs = torch.randn(2, 4, 16).double(), (torch.ones(1, 8, 4).double(), torch.zeros(1, 8, 4).double())
    torch._dynamo.reset()
    y = torch.compile(layer, backend=lambda graph, _: (graphs.append(graph), graph.forward)[1])(*inputs)
    return len(graphs), (y - layer(*inputs)).abs().max().item()


def test_a_compiled_layer_has_one_break_at_each_place_that_communicates() -> None:
    for graphs, difference in on_ranks({"tensor": 2}, compiled):
        assert graphs == 5, "what is before, between and after four places"
        assert difference < 1e-12
