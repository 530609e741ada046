"""Pipeline parallelism: training, evaluation and checkpoints equal those of one process, with each schedule."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai.dist.mesh import Mesh
from hpcai.errors import ConfigError, DivergedError
from hpcai.parallel.pipeline import Pipeline
from hpcai.settings import StepConfig
from hpcai.train import rng
from hpcai.train.compiling import repeated_blocks
from hpcai.train.evaluation import evaluate, predict
from hpcai.train.step import SingleStage, Step
from tests.ranks.launch import on_ranks
from tests.ranks.training import Case, check_reshard, check_sharded_equals_full

WIDTH, VOCAB = 8, 24
SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "gpipe"}, {"schedule": "1f1b"}, {"schedule": "zero-bubble"}, {"schedule": "gpipe", "per_rank": 2},
    {"schedule": "1f1b", "per_rank": 2}, {"schedule": "zero-bubble", "per_rank": 2}, {"schedule": "zero-bubble-v", "per_rank": 2},
]  # fmt: skip


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear = norm, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)) + shift.to(x.dtype))


class Transposed(Block):
    """A block that returns a view with another memory order."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return super().forward(x, shift).mT.contiguous().mT


class Network(nn.Module):
    """A network of blocks that use a token and its position.   B batch, T tokens"""

    def __init__(self, tied: bool = False, count: int = 4, kind: type[Block] = Block) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(kind(nn.LayerNorm(WIDTH)) for _ in range(count))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens [B, T], positions [T] -> logits [B, T, VOCAB]"""
        x, shift = self.embedding(tokens), positions[:, None]
        for block in self.blocks:
            x = block(x, shift)
        return self.head(self.norm(x))


class Odd(nn.Module):
    """A network with running statistics, a weight shared by two blocks, and weights and a buffer outside the stages."""

    def __init__(self, fixed: bool = False) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block(nn.BatchNorm1d(WIDTH)) for _ in range(4))
        self.blocks[2].linear = self.blocks[0].linear
        self.shift, self.scale = nn.Parameter(torch.randn(WIDTH), not fixed), nn.Parameter(torch.ones(()))
        self.register_buffer("offset", torch.tensor(0.5))

    def forward(self, tokens: Tensor, *, shift: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, shift)
        return self.head(self.norm(x))


def loss(model: Any, part: dict[str, Tensor]) -> dict[str, Any]:
    tokens = part["tokens"]
    logits = model(tokens, torch.arange(tokens.shape[1]))
    entropy = F.cross_entropy(logits.flatten(0, 1), part["targets"].flatten())
    return {"loss": entropy, "greatest": logits.abs().amax(), "pair": (logits.sum(), float(len(tokens)))}


def odd_loss(model: Any, part: dict[str, Tensor]) -> dict[str, Any]:
    """Return a loss that uses weights outside the stages before and after the model call."""
    out = model(part["tokens"][:, 0], shift=model.shift * model.offset) * model.scale
    error = (out - part["targets"][:, :3]).square().mean()
    return {"loss": error, "greatest": out.abs().amax(), "pair": (out.sum(), float(len(out)))}


MODELS: dict[str, Any] = {
    "untied": Network, "tied": lambda: Network(tied=True), "five": lambda: Network(count=5),
    "transposed": lambda: Network(kind=Transposed), "odd": Odd, "fixed": lambda: Odd(fixed=True),
}  # fmt: skip


def new_step(mesh: Mesh, case: Case, seed: int = 0, function: Any = None) -> Step:
    """``case``: The model, the arguments of Pipeline ("pipeline"), and settings of the step."""
    torch.manual_seed(seed + mesh["replicate"].rank)  # replicas start equal, whatever their initialization
    model = MODELS[case["model"]]()
    pipeline = Pipeline(model, mesh, **case.get("pipeline", {})) if mesh["pipeline"].size > 1 else None
    function = function or (odd_loss if isinstance(model, Odd) else loss)
    settings = {"precision": "fp64", "clip": 0.5, "ema_decay": 0.9, "weight_decay": 0.1, "bucket_mb": 1e-3}
    settings |= {name: value for name, value in case.items() if name not in ("model", "pipeline")}
    settings["accumulate"] = case.get("accumulate", 4) // mesh["replicate"].size
    return Step(model, function, StepConfig(**settings), mesh, pipeline=pipeline)


def batch(step: int, samples: int = 8) -> dict[str, Tensor]:
    """Return batches of alternating sample lengths."""
    tokens = torch.randint(0, VOCAB, (samples, 9 - 2 * (step % 2)), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def batches(mesh: Mesh, case: Case, first: int, steps: int) -> list[dict[str, Tensor]]:
    axis = mesh["replicate"]
    full = [batch(step) for step in range(first, first + steps)]
    return [{name: value.chunk(axis.size)[axis.rank] for name, value in each.items()} for each in full]


def odd(pipeline: dict[str, Any]) -> Case:
    return {"model": "fixed" if "zero" in pipeline["schedule"] else "odd", "pipeline": pipeline}


def tied(pipeline: dict[str, Any], **settings: Any) -> Case:
    return {"model": "tied", "pipeline": pipeline, **settings}


CASES: list[tuple[dict[str, int], list[Case]]] = [
    ({"pipeline": 2}, [
        *map(odd, SCHEDULES), *map(tied, SCHEDULES[2:]), *({"model": "transposed", "pipeline": s} for s in SCHEDULES[1:3]),
        tied({"sizes": [3, 1]}), {"model": "untied", "pipeline": {"sizes": [0, 4]}, "accumulate": 8, "clip": None},
        {"model": "five", "optimizer": "muon"}, tied({}, optimizer="lamb"), {"model": "odd", "optimizer": "lamb"},
        tied(SCHEDULES[0], accumulate=1),
    ]),
    ({"pipeline": 4}, [
        *map(odd, SCHEDULES[:3]), *(tied(s, optimizer="lamb") for s in SCHEDULES[:3]), tied(SCHEDULES[0], accumulate=2),
        {"model": "five", "pipeline": {"sizes": [1, 1, 2, 1]}},
    ]),
    ({"replicate": 2, "pipeline": 2}, [
        tied(SCHEDULES[1]), tied(SCHEDULES[2], shard="optimizer"), tied(SCHEDULES[4], shard="weights"),
        {"model": "untied", "pipeline": SCHEDULES[1], "optimizer": "lamb", "shard": "optimizer"},
        {"model": "untied", "pipeline": SCHEDULES[1], "optimizer": "lamb", "shard": "weights"},
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("axes", "cases"), CASES, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_stages_train_as_one_process_does(axes: dict[str, int], cases: list[Case]) -> None:
    check_sharded_equals_full(axes, cases, new_step, batches, ("loss", "greatest", "pair"))


@pytest.mark.parametrize("model", ["tied", "odd"])
def test_a_checkpoint_loads_with_every_number_of_stages(tmp_path: Path, model: str) -> None:
    layouts: list[tuple[dict[str, int], Case]] = [({"pipeline": 2}, {}), ({}, {}), ({"pipeline": 4}, {})]
    if model == "tied":
        both = {"replicate": 2, "pipeline": 2}
        layouts += [({"pipeline": 2}, {"pipeline": SCHEDULES[6]}), (both, {"shard": "optimizer"}), (both, {"shard": "weights"})]
    layouts = [(axes, case | {"model": model, "optimizer": "lamb"}) for axes, case in layouts]
    check_reshard(layouts, tmp_path, new_step, batches)


# ---- errors


def broken_loss(model: Any, part: dict[str, Tensor]) -> dict[str, Any]:
    """Return a loss that is not finite in one micro-batch, with a gradient that is not finite for the head only."""
    factor = torch.where(part["tokens"][0, 0] == VOCAB - 1, torch.nan, 0.0)
    return {"loss": loss(model, part)["loss"] + factor * model.head.weight.sum()}


def step_with_broken_loss(mesh: Mesh) -> tuple[bool, str]:
    """Return whether the weights are unchanged, and the message."""
    step, good = new_step(mesh, {"model": "untied"}, function=broken_loss), batch(0)
    good["tokens"][:, 0] = 1
    step(good)
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    bad = {name: value.clone() for name, value in good.items()}
    bad["tokens"][4, 0] = VOCAB - 1
    step(bad)
    step(good)
    with pytest.raises(DivergedError) as error:
        step.check()
    return all(map(torch.equal, step.model.parameters(), before)), str(error.value)


def test_a_loss_that_is_not_finite_on_the_last_stage_changes_no_weights_on_any_stage() -> None:
    for unchanged, message in on_ranks({"pipeline": 2}, step_with_broken_loss):
        assert unchanged and message.startswith("step 2: the loss is not finite on rank 0 and rank 1;")


def bit_flip_messages(mesh: Mesh, name: str, model: str, rank: int) -> list[str]:
    """Return the messages about a bit flip in a weight on one rank."""
    step, messages = new_step(mesh, {"model": model}), []
    for flip in (False, True):
        step(batches(mesh, {}, 0, 1)[0])
        if flip and mesh.rank == rank:
            weight: Any = step.optimizer.weights()[name]
            weight.view.full(weight.flat).view(torch.int64).flatten()[0] ^= 1
        try:
            step.replica_check.raise_if_divergent(int(step.first_failures(compare=True)[1].item()), step.count)
        except DivergedError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize(("axes", "name", "model", "rank", "ranks"), [
    ({"replicate": 2, "pipeline": 2}, "blocks.0.linear.weight", "untied", 2, "rank 0 and rank 2"),
    ({"replicate": 2, "pipeline": 2}, "blocks.3.linear.weight", "untied", 3, "rank 1 and rank 3"),
    ({"pipeline": 4}, "embedding.weight", "tied", 3, "rank 0 and rank 3"),
], ids=str)  # fmt: skip
def test_a_flipped_bit_of_a_stage_is_named(axes: dict[str, int], name: str, model: str, rank: int, ranks: str) -> None:
    for messages in on_ranks(axes, bit_flip_messages, name, model, rank):
        assert len(messages) == 1 and f"the weights of {ranks} differ" in messages[0] and f"first in {name};" in messages[0]


def twice(model: Any, part: dict[str, Tensor]) -> dict[str, Any]:
    return {"loss": loss(model, part)["loss"] + loss(model, part)["loss"]}


REFUSED: list[tuple[dict[str, int], Case, Any, str]] = [
    ({"pipeline": 2}, {}, twice, "calls the model more than once"),
    ({"pipeline": 2}, {"accumulate": 1}, None, "is 1, which Schedule1F1B does not support with 2 stages on 2 ranks"),
    ({"pipeline": 2}, {"model": "odd", "pipeline": SCHEDULES[2]}, None, "calls the model with an argument other than the"),
    ({"pipeline": 2}, {"pipeline": {"sizes": [4, 1]}}, None, "4 blocks cannot be split into 2 stages of [4, 1]"),
    ({"pipeline": 2}, {"capture": "whole"}, None, "step.capture is whole"),
    ({"pipeline": 2}, {"decay_names": ("head.*", "nothing.*")}, None, "'nothing.*' matches no parameter"),
    ({"replicate": 2, "pipeline": 2}, {"pipeline": SCHEDULES[2], "shard": "weights"}, None,
     "shard is weights, but zero-bubble needs"),
]


def error_text(mesh: Mesh, case: Case, function: Any) -> str:
    with pytest.raises(ConfigError) as error:
        new_step(mesh, {"model": "untied"} | case, function=function)(batches(mesh, case, 0, 1)[0])
    return str(error.value)


@pytest.mark.parametrize(("axes", "case", "function", "text"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_unsupported_settings_are_refused_on_all_stages(axes: dict[str, int], case: Case, function: Any, text: str) -> None:
    assert all(text in message for message in on_ranks(axes, error_text, case, function))


# ---- evaluation, and the modules of a rank


def sample_means(model: Any, part: dict[str, Tensor]) -> dict[str, Tensor]:
    assert not model.training
    return {"mean": model(part["tokens"], torch.arange(part["tokens"].shape[1])).mean((1, 2))}


def evaluate_and_predict(mesh: Mesh, pipeline: dict[str, Any]) -> tuple[dict[str, float], list[float]]:
    """Return metrics over batches of several sizes before and after a step, and a row for each sample."""
    step, parts = new_step(mesh, tied(pipeline)), [batch(samples, samples) for samples in (8, 3, 2)]
    before = evaluate(step, loss, parts)
    step(batch(0))
    after = evaluate(step, loss, parts)
    assert step.model.training
    metrics = before | {f"{name} after": value for name, value in after.items()}
    return metrics, predict(step, sample_means, parts).get("mean", np.zeros(0)).tolist()


@pytest.mark.parametrize(("ranks", "pipeline"), [(2, SCHEDULES[1]), (4, SCHEDULES[0]), (2, SCHEDULES[6])], ids=str)
def test_all_stages_have_the_metrics_and_the_first_process_has_the_predictions(ranks: int, pipeline: dict[str, Any]) -> None:
    expected, mean = evaluate_and_predict(Mesh({}), {})
    assert len(mean) == 13
    for rank, (metrics, values) in enumerate(on_ranks({"pipeline": ranks}, evaluate_and_predict, pipeline)):
        assert metrics == pytest.approx(expected, rel=1e-12) and values == pytest.approx([] if rank else mean, rel=1e-12)


def draw_random(*_: Any) -> None:
    torch.rand(())


def local_blocks(mesh: Mesh) -> tuple[set[str], list[str], int, list[str]]:
    """Return parameters and executed blocks of this rank, random draws in its first step (one per block), and blocks to compile."""
    step, ran = new_step(mesh, {"model": "untied", "pipeline": {"sizes": [1, 3]}}), list[str]()
    names = {module: name for name, module in step.model.named_modules()}
    for block in repeated_blocks(step.model):
        block.register_forward_hook(lambda block, *_: ran.append(names[block]))
        block.register_forward_hook(draw_random)
    step(batch(0))
    following = torch.rand(()).item()
    rng.seed_step(step._seed, 0, 0)
    draws = torch.rand(100).tolist().index(following)
    ran.clear()  # of the first step, which also traces the outputs of stages
    step(batch(2))
    parameters = {".".join(name.split(".")[:2]) for name, _ in step.model.named_parameters()}
    return parameters, ran, draws, [names[block] for block in repeated_blocks(step.model)]


def test_a_rank_holds_and_runs_only_its_own_blocks() -> None:
    (first, first_ran, *first_rest), (last, last_ran, *last_rest) = on_ranks({"pipeline": 2}, local_blocks)
    assert first == {"blocks.0", "embedding.weight"} and first_ran == ["blocks.0"] * 4 and first_rest == [4, ["blocks.0"]]
    assert last == {"blocks.1", "blocks.2", "blocks.3", "norm.weight", "norm.bias", "head.weight"}
    assert last_ran == ["blocks.1", "blocks.2", "blocks.3"] * 4 and last_rest == [12, ["blocks.1", "blocks.2", "blocks.3"]]


def test_a_pipeline_of_one_rank_is_the_full_model() -> None:
    model = Network()
    names = [name for name, _ in model.named_parameters()]
    step = Step(model, loss, StepConfig(), Mesh({}), pipeline=Pipeline(model, Mesh({})))
    assert isinstance(step.pipeline, SingleStage) and [name for name, _ in step.model.named_parameters()] == names
