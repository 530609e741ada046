"""Linear layers, embeddings and losses that are cut over ``tensor``: the same training as with whole ones, the same checkpoints."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpcai.dist.collect import gather_objects
from hpcai.dist.mesh import Axis, Mesh
from hpcai.errors import ConfigError, MeshError
from hpcai.parallel import tensor
from hpcai.parallel.replicate import sum_over
from hpcai.parallel.tensor import Entropy, cut_inputs, cut_outputs, cut_words, heads
from hpcai.settings import CheckpointConfig, StepConfig
from hpcai.train.checkpoint import Checkpoints
from hpcai.train.saved import Progress, read_tensors
from hpcai.train.step import Step
from tests.ranks.launch import on_ranks
from tests.ranks.pieces import Pieces, joined, pieces
from tests.ranks.transformer import HEADS, WIDTH, Transformer, batch, mean_loss, rotated

STEPS = 2
WHOLE: dict[str, int] = {"tensor": 1}
CUTS = [{"tensor": 2}, {"tensor": 4}, {"replicate": 2, "tensor": 2}]


class Grouped(nn.Module):
    """Attention of which several heads of queries share keys and values (Ainslie et al., "GQA", 2023)."""

    def __init__(self, width: int, queries: int, keys: int) -> None:
        super().__init__()
        self.size, self.keys = width // queries, keys
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * keys * self.size), nn.Linear(width, width)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in self.kv(x).chunk(2, -1))
        y = F.scaled_dot_product_attention(rotated(q, positions), rotated(k, positions), v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


def parallelize(model: Transformer, mesh: Mesh, sequence: bool) -> Transformer:
    axis, dim = mesh["tensor"], 1 if sequence else None
    cut_words(model.embedding, axis, dim)
    for block in model.blocks:
        attention, feed = block.attention, block.feed
        if isinstance(attention, Grouped):
            cut_outputs(attention.q, axis, sequence=dim)
            groups = mesh.split("tensor", max(axis.size // attention.keys, 1), "keys")
            cut_outputs(attention.kv, axis, [attention.keys * attention.size] * 2, sequence=dim, groups=groups)
        else:
            cut_outputs(attention.qkv, axis, heads(axis, attention.size, HEADS), sequence=dim)
        cut_inputs(attention.out, axis, dim)
        cut_outputs(feed.gate_up, axis, [2 * WIDTH, 2 * WIDTH], sequence=dim)
        cut_inputs(feed.down, axis, dim)
    cut_outputs(model.head, axis, sequence=dim)
    model.entropy = Entropy(axis, model.embedding.num_embeddings)
    if sequence:
        sum_over(model, axis)
    return model


def new_step(mesh: Mesh, case: dict[str, Any], seed: int = 0) -> Step:
    """``case``: settings of the step, and of the model: sequence, tied, words, keys."""
    torch.manual_seed(seed)
    model = Transformer(layers=2, tied=case.get("tied", False), vocabulary=case.get("words", 24))
    for block in model.blocks if "keys" in case else ():
        block.attention = Grouped(WIDTH, HEADS, case["keys"])
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    words = {"precision": "fp64", "weight_decay": 0.1, "clip": 0.5, "average": 0.9, "accumulate": 2 // mesh["replicate"].size}
    words |= {name: value for name, value in case.items() if name in StepConfig.model_fields}
    return Step(parallelize(model, mesh, case.get("sequence", False)), mean_loss, StepConfig(**words), mesh)


def train(step: Step, words: int, first: int = 0, steps: int = STEPS) -> float:
    """The loss of the last step: each copy has half of the samples, one after another or side by side."""
    axis = step.mesh["replicate"]
    for i in range(first, first + steps):
        samples = {name: t.chunk(axis.size)[axis.rank] for name, t in batch(i, vocabulary=words).items()}
        values = step(samples, 0.05 / (i + 1))
    step.check()
    return float(values["loss"])


def trained(mesh: Mesh, cases: list[dict[str, Any]]) -> list[tuple[Pieces, float, float]]:
    found = []
    for case in cases:
        step = new_step(mesh, case)
        loss = train(step, case.get("words", 24))
        found.append((pieces(step), step._norm().item(), loss))
        assert step.first_bad(compare=True)[1] > STEPS, "what copies hold is the same"
    return found


@cache
def _by_one_rank(case: str) -> tuple[dict[str, Any], float, float]:
    (rank, norm, loss), = trained(Mesh({}), [json.loads(case)])  # fmt: skip
    return joined([rank]), norm, loss


def by_one_rank(case: dict[str, Any]) -> tuple[dict[str, Any], float, float]:
    return _by_one_rank(json.dumps({name: value for name, value in case.items() if name not in ("sequence", "shard")}))


def same(found: dict[str, Any], right: dict[str, Any], exactly: bool = False) -> None:
    assert found.keys() == right.keys()
    for name, value in right.items():
        bound = 0.0 if exactly else 1e-12 * max(1.0, np.abs(value).max())
        np.testing.assert_allclose(found[name], value, rtol=0, atol=bound, err_msg=name)


TIED = {"tied": True, "words": 23}
CASES = [
    {"optimizer": "adamw"}, {"optimizer": "adamw", "sequence": True}, {"optimizer": "adamw", **TIED, "sequence": True},
    {"optimizer": "lamb", **TIED}, {"optimizer": "lamb", "keys": 2, "sequence": True},
    {"optimizer": "sgd", "sequence": True}, {"optimizer": "sgd", "keys": 2}, {"optimizer": "sgd", "keys": 1, "sequence": True},
]  # fmt: skip


@pytest.mark.parametrize(
    ("axes", "every"), [*((axes, False) for axes in CUTS), pytest.param(CUTS[-1], True, marks=pytest.mark.claim)], ids=str
)
def test_cut_equals_whole(axes: dict[str, int], every: bool) -> None:
    """Copies divide the state of a case in one way, or in ``every``."""
    ways = ("none", "optimizer", "weights")
    cases: list[dict[str, Any]] = [case | {"shard": "none"} for case in CASES] + [CASES[1] | {"shard": way} for way in ways[1:]]
    if "replicate" in axes:
        cases = [case | {"shard": way} for n, case in enumerate(CASES) for way in (ways if every else ways[n % 3 : n % 3 + 1])]
    for case, *ranks in zip(cases, *on_ranks(axes, trained, cases)):
        right, norm, loss = by_one_rank(case)
        same(joined([rank[0] for rank in ranks]), right)
        means = [rank[2] for rank in ranks]
        assert all(abs(rank[1] - norm) < 1e-12 * norm for rank in ranks), case
        assert abs(sum(means) / len(means) - loss) < 1e-12, case


def written(mesh: Mesh, folder: Path, case: dict[str, Any]) -> Pieces:
    step = new_step(mesh, case)
    train(step, case["words"])
    Checkpoints(folder, CheckpointConfig(), mesh).save(step, Progress(step=STEPS))
    return [piece for piece in pieces(step) if not piece[0].endswith("gradient")]


def read(mesh: Mesh, folders: list[Path], case: dict[str, Any]) -> list[tuple[Pieces, Pieces]]:
    """What each folder gave, and what followed on it."""
    found = []
    for folder in folders:
        step = new_step(mesh, case, seed=7)
        progress = Checkpoints(folder, CheckpointConfig(), mesh).resume(step)
        assert progress is not None and progress.step == step.count == step.optimizer.count.item() == STEPS
        drawn = gather_objects(torch.rand(4).tolist(), mesh["tensor"])
        assert all(each == drawn[0] for each in drawn), "dropout of what is whole is the same on all ranks of a copy"
        now = [piece for piece in pieces(step) if not piece[0].endswith("gradient")]
        train(step, case["words"], STEPS, 1)
        found.append((now, pieces(step)))
    return found


PLACES: list[tuple[dict[str, int], dict[str, Any]]] = [
    (WHOLE, {}), ({"tensor": 2}, {"sequence": True}), ({"tensor": 4}, {}),
    ({"replicate": 2, "tensor": 2}, {"shard": "optimizer"}),
    ({"replicate": 2, "tensor": 2}, {"shard": "weights", "sequence": True}),
]  # fmt: skip


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.claim)])
def test_a_checkpoint_goes_from_every_cut_to_every_other(tmp_path: Path, every: bool) -> None:
    """Or from each to the one after it."""
    places = [(axes, {"optimizer": "adamw", "keys": 2, **TIED, **case}) for axes, case in PLACES]
    folders = [tmp_path / str(number) for number in range(len(places))]
    before = [joined(on_ranks(axes, written, folder, case)) for (axes, case), folder in zip(places, folders)]
    after: dict[str, Any] = {}
    for place, (axes, case) in enumerate(places):
        given = range(len(places)) if every else [place - 1]
        ranks = on_ranks(axes, read, [folders[number] for number in given], case)
        for k, number in enumerate(given):
            same(joined([rank[k][0] for rank in ranks]), before[number], exactly=True)
            after = after or joined([rank[k][1] for rank in ranks])
            same(joined([rank[k][1] for rank in ranks]), after)
    newest = [folder / f"step-{STEPS:08d}" for folder in folders]
    sizes = [{n: tuple(t.shape) for n, t in read_tensors(path).items() if not n.startswith("rng")} for path in newest]
    assert all(each == sizes[0] for each in sizes)


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
        cut_outputs(linear, axis, parts, gather=True)
        x = torch.randn(3, 2, 5).double()
        a, b = (x.clone().requires_grad_() for _ in range(2))
        y, right = linear(a), whole(b)
        torch.testing.assert_close(y, right, rtol=0, atol=1e-12)
        (y.square().sum() + y[..., 0].sum()).backward()
        (right.square().sum() + right[..., 0].sum()).backward()
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


def entropies(mesh: Mesh) -> None:
    axis = mesh["tensor"]
    for words, scale, dtype in ((11, 1.0, torch.float64), (12, 300.0, torch.float64), (11, 3.0, torch.bfloat16)):
        a = (scale * torch.randn(2, 6, words)).to(dtype).requires_grad_()
        b = a.detach().clone().requires_grad_()
        targets = torch.randint(-1, words, (2, 6))
        factor = torch.randn(2, 6).to(torch.promote_types(dtype, torch.float32))
        first, end = words * axis.rank // axis.size, words * (axis.rank + 1) // axis.size
        loss = Entropy(axis, words)(a[..., first:end], targets)
        right = F.cross_entropy(b.to(factor.dtype).transpose(1, 2), targets, ignore_index=-1, reduction="none")
        (loss * factor).sum().backward()
        (right * factor).sum().backward()
        narrow = dtype == torch.bfloat16
        torch.testing.assert_close(loss, right, rtol=0, atol=1e-6 if narrow else 1e-12 * scale)
        found, right = (x.grad[..., first:end].double() for x in (a, b))
        torch.testing.assert_close(found, right, rtol=2**-7 if narrow else 0, atol=1e-9 if narrow else 1e-12)
    targets[0, :3] = torch.tensor([words, -2, -1])
    assert Entropy(axis, words)(a[..., first:end], targets)[0, :3].isnan().tolist() == [True, True, False]
    with pytest.raises(ConfigError, match="this rank got logits of 12 words, expected"):
        Entropy(axis, words)(torch.zeros(12), torch.tensor(0))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_layers_and_entropies_that_are_cut_are_those_that_are_whole(n: int) -> None:
    on_ranks({"tensor": n}, layers)
    on_ranks({"tensor": n}, entropies)


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


def quiet(mesh: Mesh, sequence: bool) -> None:
    step = new_step(mesh, {"optimizer": "adamw", "sequence": sequence})
    train(step, 24, steps=1)
    with Watched():
        step({name: t.chunk(mesh["replicate"].size)[mesh["replicate"].rank] for name, t in batch(1).items()})


def test_nothing_in_a_step_reads_the_device() -> None:
    for sequence in (False, True):
        on_ranks({"tensor": 2}, quiet, sequence)


def narrow(mesh: Mesh, precision: str, sequence: bool) -> tuple[float, float, set[torch.dtype]]:
    """The loss, the norm of the gradient, and what layers give."""
    step = new_step(mesh, {"optimizer": "adamw", "precision": precision, "sequence": sequence})
    dtypes: set[torch.dtype] = set()
    for layer in (*step.model.blocks[0].feed.children(), step.model.blocks[0].attention.out):
        layer.register_forward_hook(lambda layer, x, y: dtypes.add(y.dtype))
    loss = train(step, 24, steps=1)
    return loss, step._norm().item(), dtypes


@pytest.mark.parametrize("precision", ["bf16", "bf16-params"])
def test_layers_compute_in_bfloat16_under_autocast(precision: str) -> None:
    (right, whole, _), = on_ranks(WHOLE, narrow, "fp64", False)  # fmt: skip
    for sequence in (False, True):
        for loss, norm, dtypes in on_ranks({"tensor": 2}, narrow, precision, sequence):
            assert dtypes == {torch.bfloat16}
            assert abs(loss - right) < 0.02 * right and abs(norm - whole) < 0.02 * whole


def compiled(mesh: Mesh, sequence: bool) -> tuple[int, float]:
    """Graphs of a compiled block, and the greatest difference that compiling makes."""
    step = new_step(mesh, {"optimizer": "adamw", "sequence": sequence})
    block, graphs = step.model.blocks[0], list[Any]()
    inputs = torch.randn(2, 8 // (mesh["tensor"].size if sequence else 1), WIDTH).double(), torch.arange(8)
    torch._dynamo.reset()
    y = torch.compile(block, backend=lambda graph, _: (graphs.append(graph), graph.forward)[1])(*inputs)
    return len(graphs), (y - block(*inputs)).abs().max().item()


def test_a_compiled_block_has_one_break_at_each_layer_that_communicates() -> None:
    for sequence in (False, True):
        for graphs, difference in on_ranks({"tensor": 2}, compiled, sequence):
            assert graphs == 5, "what is before, between and after four layers"
            assert difference < 1e-12


def refusals(mesh: Mesh) -> None:
    axis = mesh["tensor"]
    linear = nn.Linear(8, 8)
    cut_outputs(linear, axis)
    with pytest.raises(ConfigError, match="a CutOutputs cannot be cut: expected an nn.Linear"):
        cut_inputs(linear, axis)
    with pytest.raises(ConfigError, match="with max_norm, scale_grad_by_freq or sparse cannot be cut"):
        cut_words(nn.Embedding(8, 2, max_norm=1.0), axis)
    with pytest.raises(ConfigError, match="outputs that several ranks have are not joined"):
        cut_outputs(nn.Linear(8, 8), axis, gather=True, groups=mesh.split("tensor", 2, "keys"))
    narrow = nn.Linear(8, 6)
    cut_inputs(narrow, axis, sequence=1)
    with pytest.raises(MeshError, match="5 tokens cannot be cut over mesh.tensor=4 in equal parts"):
        narrow(torch.zeros(1, 5, 2))


def test_what_cannot_be_cut_is_refused() -> None:
    on_ranks({"tensor": 4}, refusals)
    axis = Axis("tensor", 4)
    assert heads(axis, 16, 8, 4) == (128, 64, 64) and heads(axis, 16, 8) == (128, 128, 128)
    with pytest.raises(ConfigError, match="6 heads of queries cannot be cut over mesh.tensor=4: expected a multiple of 4$"):
        heads(axis, 16, 6)
    with pytest.raises(ConfigError, match="2 heads of keys cannot be cut .*; fewer heads of keys than ranks"):
        heads(axis, 16, 8, 2)
    with pytest.raises(ConfigError, match="8 heads of queries cannot share 12 heads of keys"):
        heads(axis, 16, 8, 12)


def test_one_rank_changes_nothing() -> None:
    model = parallelize(Transformer(layers=1), Mesh({}), sequence=True)
    assert {type(module) for module in model.modules() if isinstance(module, nn.Linear)} == {nn.Linear}
