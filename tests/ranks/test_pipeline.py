"""A model as stages along the axis pipeline: the same training, evaluation and checkpoints as on one process, for each schedule."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hpcai.dist.mesh import Mesh
from hpcai.errors import ConfigError, DivergedError
from hpcai.parallel.pipeline import Pipeline
from hpcai.settings import CheckpointConfig, StepConfig
from hpcai.train import rng
from hpcai.train.checkpoint import Checkpoints
from hpcai.train.compiling import blocks
from hpcai.train.evaluation import evaluate, predict
from hpcai.train.saved import Progress, read_tensors
from hpcai.train.step import Step, Whole
from tests.ranks.launch import on_ranks
from tests.ranks.transformer import Block, Transformer, batch, loss, mean_loss

STEPS = 3
WORDS: dict[str, Any] = {"precision": "fp64", "accumulate": 4, "clip": 0.5, "average": 0.9, "weight_decay": 0.1, "bucket_mb": 5e-3}
Case = tuple[str, dict[str, Any], dict[str, Any]]  # the model, the arguments of Pipeline, settings of the step


class Layer(nn.Module):
    def __init__(self, shared: nn.Linear | None = None) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(8), shared or nn.Linear(8, 8)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)) + shift)


class Odd(nn.Module):
    """Has running statistics, a weight in two blocks, and weights and a buffer that are in no stage."""

    def __init__(self, fixed: bool = False) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(24, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList([Layer() for _ in range(4)])
        self.blocks[2].linear = self.blocks[0].linear
        self.shift, self.scale = nn.Parameter(torch.randn(8), not fixed), nn.Parameter(torch.ones(()))
        self.register_buffer("offset", torch.tensor(0.5))

    def forward(self, tokens: Tensor, *, shift: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, shift)
        return self.head(self.norm(x))


def odd_loss(model: Any, part: dict[str, Tensor]) -> dict[str, Any]:
    """Uses weights that are in no stage before and after the model's call."""
    out = model(part["tokens"][:, 0], shift=model.shift * model.offset) * model.scale
    error = (out - part["targets"][:, :3]).square().mean()
    return {"loss": error, "greatest": out.abs().amax(), "pair": (out.sum(), float(len(out)))}


class Turned(Block):
    """Gives a view whose numbers lie in another order."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().forward(x, positions).mT.contiguous().mT


def turned() -> Transformer:
    model = Transformer()
    model.blocks = nn.ModuleList(Turned(16, 4) for _ in range(4))
    return model


MODELS: dict[str, Any] = {"untied": Transformer, "tied": lambda: Transformer(tied=True), "odd": Odd}
MODELS |= {"five": lambda: Transformer(layers=5), "fixed": lambda: Odd(fixed=True), "turned": turned}


def new_step(mesh: Mesh, case: Case, seed: int = 0, function: Any = None) -> Step:
    name, how, words = case
    torch.manual_seed(seed)
    model = MODELS[name]()
    act = Pipeline(model, mesh, **how) if mesh["pipeline"].size > 1 else None
    function = function or (odd_loss if name in ("odd", "fixed") else mean_loss)
    return Step(model, function, StepConfig(**(WORDS | words)), mesh, act=act)


def own(mesh: Mesh, step: int, copies: int) -> dict[str, Tensor]:
    """What a copy of the model gets of a batch of 8 samples, longer and shorter ones in turn, for each of ``copies``."""
    axis = mesh["replicate"]
    whole = batch(step, 8 * copies, 8 - 2 * (step % 2))
    return {name: value.chunk(axis.size)[axis.rank] for name, value in whole.items()}


def numbers(named: Any) -> dict[str, np.ndarray]:
    whole = ((name, value.full_tensor() if hasattr(value, "full_tensor") else value) for name, value in named)
    return {name: value.detach().double().numpy().copy() for name, value in whole}


def followed(mesh: Mesh, case: Case, copies: int, seed: int | None = None) -> dict[str, Any]:
    """What this rank knows of its steps: what was told, and what it holds."""
    step = new_step(mesh, case, mesh["replicate"].rank if seed is None else seed)
    told, gradients, norms = [], {}, []
    for i in range(STEPS):
        values = step(own(mesh, i, copies), 0.05 / (i + 1))
        told.append({name: [float(x) for x in (value if isinstance(value, tuple) else (value,))] for name, value in values.items()})
        norms.append(step._norm().item())
        rows = [(row, row.gradient()) for row in step.sums.rows if row.cut.size == 1]
        gradients |= numbers((f"{p.name} {i}", p.whole(found)) for row, found in rows if found is not None for p in row.parts)
    step.check()
    step.sums.settle()
    live = numbers(step.model.state_dict().items())
    with step.average.applied():
        mean = numbers(step.model.state_dict().items())
    return {"told": told, "norms": norms, "held": [gradients, live, mean], "first": step.first_bad(compare=True).tolist()}


def each(mesh: Mesh, cases: list[Case], copies: int) -> list[dict[str, Any]]:
    return [followed(mesh, case, copies) for case in cases]


@cache
def by_one(name: str, words: tuple[Any, ...], copies: int) -> dict[str, Any]:
    """One process with the micro-batches of all copies."""
    settings = dict(words) | {"accumulate": dict(words).get("accumulate", 4) * copies}
    return followed(Mesh({}), (name, {}, settings), copies, seed=0)


def same(found: dict[str, Any], right: dict[str, Any], what: Any) -> None:
    assert found.keys() == right.keys(), what
    for name, value in right.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-13, err_msg=f"{what}: {name}")


def all_equal_one(axes: dict[str, int], cases: list[Case]) -> None:
    copies = axes.get("replicate", 1)
    found = on_ranks(axes, each, cases, copies)
    for number, case in enumerate(cases):
        right = by_one(case[0], tuple(case[2].items()), copies)
        ranks = [rank[number] for rank in found]
        for rank in ranks:
            np.testing.assert_allclose(rank["norms"], right["norms"], rtol=1e-12, err_msg=str(case))
            assert rank["first"] == [2**62, 2**62], case
            if copies == 1:  # else each copy tells of its own part of the batch
                for told, expected in zip(rank["told"], right["told"]):
                    same(told, expected, case)
        for kind, expected in enumerate(right["held"]):
            merged: dict[str, Any] = {}
            for rank in ranks:
                same({n: v for n, v in rank["held"][kind].items() if n in merged},
                     {n: merged[n] for n in rank["held"][kind] if n in merged}, case)  # fmt: skip
                merged |= rank["held"][kind]
            if kind or case[2].get("shard", "none") == "none":
                same(merged, expected, case)


SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "gpipe"}, {"schedule": "1f1b"}, {"schedule": "zero-bubble"}, {"schedule": "gpipe", "per_rank": 2},
    {"schedule": "1f1b", "per_rank": 2}, {"schedule": "zero-bubble", "per_rank": 2}, {"schedule": "zero-bubble-v", "per_rank": 2},
]  # fmt: skip


def odd(how: dict[str, Any]) -> str:
    return "fixed" if "zero" in how["schedule"] else "odd"


EVERY = [False, pytest.param(True, marks=pytest.mark.claim)]  # schedule with every model, or those that say most of it


@pytest.mark.parametrize("every", EVERY)
def test_stages_on_two_ranks_train_as_one_process_does(every: bool) -> None:
    plain: list[Case] = [(name, how, {}) for how in SCHEDULES for name in ("tied", "untied", odd(how)) if every or name != "untied"]
    sizes: list[Case] = [("tied", {"sizes": [3, 1]}, {}), ("untied", {"sizes": [0, 4]}, {}), ("five", {}, {})]
    words: list[Case] = [(name, {}, {"optimizer": "lamb"}) for name in ("tied", "odd")]
    few: list[Case] = [("tied", {"schedule": "gpipe"}, {"accumulate": 1}), ("untied", {}, {"accumulate": 8, "clip": None})]
    views: list[Case] = [("turned", how, {}) for how in SCHEDULES[1:3]]
    all_equal_one({"pipeline": 2}, plain + sizes + words + few + views)


def test_stages_on_four_ranks_train_as_one_process_does() -> None:
    cases: list[Case] = [("tied", how, {}) for how in SCHEDULES[:3]] + [(odd(how), how, {}) for how in SCHEDULES[:3]]
    cases += [("five", {"sizes": [1, 1, 2, 1]}, {"optimizer": "lamb"}), ("tied", {}, {"optimizer": "lamb"})]
    cases += [("tied", {"schedule": "gpipe"}, {"accumulate": 2})]
    all_equal_one({"pipeline": 4}, cases)


@pytest.mark.parametrize("every", EVERY)
def test_copies_of_stages_train_as_one_process_does(every: bool) -> None:
    cases: list[Case] = [
        (name, how, {"shard": shard, "optimizer": optimizer})
        for name in ("tied", "untied") for shard in ("none", "optimizer") for optimizer in ("adamw", "lamb")
        for how in SCHEDULES[1:3] if optimizer == "adamw" or how == SCHEDULES[1]
    ]  # fmt: skip
    cases += [(name, how, {"shard": "weights"}) for name in ("tied", "untied") for how in (SCHEDULES[0], SCHEDULES[4])]
    cases = [case for case in cases if every or (case[0] == "tied") == (case[2].get("optimizer") != "lamb")]
    cases += [("untied", SCHEDULES[1], {"shard": "weights", "optimizer": "lamb"})]
    all_equal_one({"replicate": 2, "pipeline": 2}, cases)


# ---- checkpoints

PLACES: list[tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = [
    ({"pipeline": 2}, {}, {}),
    ({"pipeline": 1}, {}, {}),
    ({"pipeline": 4}, {"schedule": "zero-bubble"}, {}),
    ({"replicate": 2, "pipeline": 2}, {}, {"shard": "optimizer"}),
    ({"pipeline": 2}, {"schedule": "zero-bubble-v", "per_rank": 2}, {}),
    ({"replicate": 2, "pipeline": 2}, {"schedule": "gpipe"}, {"shard": "weights"}),
]


def written(mesh: Mesh, case: Case, folder: Path) -> None:
    step = new_step(mesh, case)
    for i in range(STEPS):
        step(own(mesh, i, 1))
    Checkpoints(folder, CheckpointConfig(), mesh).save(step, Progress(step=STEPS))


def gone_on(mesh: Mesh, case: Case, folders: list[tuple[Path, Path]]) -> list[dict[str, Any]]:
    """What is held one step after each checkpoint, which is also written again as it was read."""
    found = []
    for folder, again in folders:
        step = new_step(mesh, case, seed=7)
        progress = Checkpoints(folder, CheckpointConfig(), mesh).resume(step)
        assert progress is not None and progress.step == step.count == STEPS
        Checkpoints(again, CheckpointConfig(), mesh).save(step, Progress(step=STEPS))
        step({name: value[: 8 // mesh["replicate"].size] for name, value in batch(STEPS).items()} if mesh["replicate"].size == 1
             else {name: value.chunk(2)[mesh["replicate"].rank] for name, value in batch(STEPS).items()})  # fmt: skip
        step.sums.settle()
        found.append(numbers(step.model.state_dict().items()))
    return found


@pytest.mark.parametrize("name", ["tied", "odd"])
def test_a_checkpoint_goes_from_any_number_of_stages_to_any_other_bit_for_bit(tmp_path: Path, name: str) -> None:
    places = [(axes, how, words | {"optimizer": "lamb"}) for axes, how, words in PLACES]
    if name == "odd":  # has arguments that depend on weights, and a scalar weight
        places = [(axes, {}, words) for axes, _, words in places if words.get("shard") != "weights"]
    writers = places[:2]
    for number, (axes, how, words) in enumerate(writers):
        on_ranks(axes, written, (name, how, words), tmp_path / f"{number}")
    right = [read_tensors(tmp_path / f"{number}" / f"step-{STEPS:08d}") for number in range(len(writers))]
    assert {n for n in right[0] if not n.startswith("rng")} == {n for n in right[1] if not n.startswith("rng")}
    after: dict[int, Any] = {}
    for place, (axes, how, words) in list(enumerate(places))[::-1]:
        folders = [(tmp_path / f"{number}", tmp_path / f"{number} by {place}") for number in range(len(writers))]
        accumulate = 4 // axes.get("replicate", 1)
        ranks = on_ranks(axes, gone_on, (name, how, words | {"accumulate": accumulate}), folders)
        for number, (_, again) in enumerate(folders):
            read = read_tensors(again / f"step-{STEPS:08d}")
            for entry, value in right[number].items():
                assert entry.startswith("rng") or torch.equal(read[entry], value), (axes, entry)
            for rank in ranks:
                if name != "odd" or "replicate" not in axes:  # the running statistics of a copy are those of its samples
                    before = after.setdefault(number, {})
                    same(rank[number] | before, before | rank[number], (axes, how))
                    after[number] = before | rank[number]


# ---- what goes wrong


def broken_loss(model: Any, part: dict[str, Tensor]) -> dict[str, Any]:
    """Not finite in one micro-batch, as is the gradient of the head alone."""
    factor = torch.where(part["tokens"][0, 0] == 23, torch.nan, 0.0)
    return {"loss": mean_loss(model, part)["loss"] + factor * model.head.weight.sum()}


def held_back(mesh: Mesh) -> tuple[bool, str]:
    """Whether weights stay where they were, and what is said."""
    step = new_step(mesh, ("untied", {}, {}), function=broken_loss)
    good = batch(0)
    good["tokens"][:, 0] = 1
    step(good)
    before = numbers(step.model.state_dict().items())
    bad = {name: value.clone() for name, value in good.items()}
    bad["tokens"][4, 0] = 23
    step(bad)
    step(good)
    after = numbers(step.model.state_dict().items())
    with pytest.raises(DivergedError) as error:
        step.check()
    return all(np.array_equal(after[name], value) for name, value in before.items()), str(error.value)


def test_a_loss_that_is_not_finite_on_the_last_stage_holds_the_weights_of_all_stages() -> None:
    for still, text in on_ranks({"pipeline": 2}, held_back):
        assert still and text.startswith("step 2: the loss is not finite on rank 0 and rank 1;")


def flipped(mesh: Mesh, name: str, case: Case, rank: int) -> list[str]:
    """What is said of a bit that flips in a weight on one rank."""
    step, told = new_step(mesh, case), []
    for struck in (False, True):
        step(own(mesh, 0, 2))
        if struck and mesh.rank == rank:
            weight = step.optimizer.weights()[name]
            part = weight if isinstance(weight, Tensor) else weight.part.whole(weight.row)
            part.view(torch.int64).flatten()[0] ^= 1
        try:
            step.agreement.tell(int(step.first_bad(compare=True)[1].item()), step.count)
        except DivergedError as error:
            told.append(str(error))
    return told


FLIPS = [
    ({"replicate": 2, "pipeline": 2}, "blocks.3.feed.down.weight", "untied", 3, "rank 1 and rank 3"),
    ({"replicate": 2, "pipeline": 2}, "embedding.weight", "tied", 3, "rank 3"),
    ({"pipeline": 4}, "embedding.weight", "tied", 3, "rank 0 and rank 3"),
    ({"pipeline": 4}, "scale", "odd", 2, "rank 2"),
]


@pytest.mark.parametrize("axes, name, model, rank, who", FLIPS, ids=str)
def test_a_flipped_bit_of_a_stage_is_named(axes: dict[str, int], name: str, model: str, rank: int, who: str) -> None:
    for told in on_ranks(axes, flipped, name, (model, {}, {}), rank):
        assert len(told) == 1 and f"the weights of {who} differ" in told[0] and f"first in {name};" in told[0]


def twice(model: Any, part: dict[str, Tensor]) -> dict[str, Any]:
    return {"loss": mean_loss(model, part)["loss"] + mean_loss(model, part)["loss"]}


def never(model: Any, part: dict[str, Tensor]) -> dict[str, Any]:
    return {"loss": model.total(part["tokens"].sum())}


class Pairs(Transformer):
    """Gives what cannot be sent."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Any:
        x = super().forward(tokens, positions)
        return (x, x)


def refused(mesh: Mesh) -> list[str]:
    MODELS["pairs"] = Pairs
    attempts: list[tuple[Case, Any]] = [
        (("untied", {}, {}), twice),
        (("untied", {}, {}), never),
        (("pairs", {}, {}), mean_loss),
        (("untied", {}, {"accumulate": 1}), None),
        (("odd", {"schedule": "zero-bubble"}, {}), None),
        (("untied", {"blocks": "layers"}, {}), None),
        (("untied", {"sizes": [4, 1]}, {}), None),
        (("untied", {"first": [], "sizes": [0, 4]}, {}), None),
        (("untied", {"schedule": "zero-bubble-v"}, {}), None),
        (("untied", {}, {"compile": "whole"}), None),
        (("untied", {}, {"capture": "whole"}), None),
        (("untied", {}, {"decay_names": ("head.*", "nothing.*")}), None),
    ]
    told = []
    for case, function in attempts:
        with pytest.raises(ConfigError) as error:
            new_step(mesh, case, function=function)(batch(0))
        told.append(str(error.value))
    return told


def test_what_a_pipeline_cannot_do_is_refused_on_all_stages_alike() -> None:
    expected = [
        "calls the model more than once", "never calls the model", "stage 0 of a pipeline gives a tuple, but one tensor",
        "step.accumulate is 1, which Schedule1F1B cannot do with 2 stages on 2 ranks", "gives the model other arguments than the",
        "Transformer has no module 'layers'; it has own, embedding, blocks", "4 blocks cannot be divided among 2 stages as [4, 1]",
        "none of them 0", "zero-bubble-v has 2 stages on each rank, not 1", "step.compile is whole",
        "step.capture is whole", "'nothing.*' matches no parameter",
    ]  # fmt: skip
    for told in on_ranks({"pipeline": 2}, refused):
        for text, part in zip(told, expected, strict=True):
            assert part in text


# ---- evaluation


def mixed(mesh: Mesh) -> str:
    with pytest.raises(ConfigError) as error:
        new_step(mesh, ("untied", {"schedule": "zero-bubble"}, {"shard": "weights"}))(batch(0))
    return str(error.value)


def test_fully_sharded_weights_and_a_backward_pass_in_two_parts_are_refused() -> None:
    for text in on_ranks({"replicate": 2, "pipeline": 2}, mixed):
        assert text.startswith("step.shard is weights, but zero-bubble needs weights")


def metric(model: Any, part: dict[str, Tensor]) -> dict[str, Any]:
    return loss(model, part) | {"training": model.training}


def scored(mesh: Mesh, how: dict[str, Any]) -> list[Any]:
    """Metrics of batches of several sizes before and after a step of training, in both modes."""
    step, found = new_step(mesh, ("tied", how, {})), list[Any]()
    for training in (False, True):
        step.model.train(training)
        for samples in (8, 8, 3, 2):
            part = batch(samples, samples)
            with torch.no_grad():
                values = step.act.forward(metric, part, step.autocast)
            if values is not None:
                assert values["training"] is training and not values["loss"][0].requires_grad
                found.append([float(values["loss"][0]), float(values["loss"][1])])
        step.model.train()
        step(batch(0))
    return found


def test_an_evaluation_by_stages_is_that_of_one_process() -> None:
    right = scored(Mesh({}), {})
    assert len(right) == 8
    for ranks, how, last in ((2, SCHEDULES[1], 1), (4, SCHEDULES[0], 3), (2, SCHEDULES[-1], 0)):
        found = on_ranks({"pipeline": ranks}, scored, how)
        assert [bool(each) for each in found] == [rank == last for rank in range(len(found))]
        np.testing.assert_allclose(found[last], right, rtol=1e-12)


def evaluated(mesh: Mesh, how: dict[str, Any]) -> tuple[dict[str, float], list[float]]:
    """Metrics over batches of several sizes, and a row for each sample."""
    step = new_step(mesh, ("tied", how, {}))
    parts = [batch(samples, samples) for samples in (8, 3, 2)]
    return evaluate(step, loss, parts), predict(step, rows, parts).get("mean", torch.zeros(0)).tolist()


def rows(model: Any, part: dict[str, Tensor]) -> dict[str, Tensor]:
    positions = torch.arange(part["tokens"].shape[1])
    return {"mean": model(part["tokens"], positions).mean((1, 2))}


def test_metrics_are_known_to_all_stages_and_predictions_to_the_first_process() -> None:
    right, mean = evaluated(Mesh({}), {})
    assert len(mean) == 13
    for ranks, how in ((2, SCHEDULES[1]), (2, SCHEDULES[-1])):
        for rank, (found, values) in enumerate(on_ranks({"pipeline": ranks}, evaluated, how)):
            assert found == pytest.approx(right, rel=1e-12) and values == pytest.approx([] if rank else mean, rel=1e-12)


def drawing(*_: Any) -> None:
    torch.rand(())


def remains(mesh: Mesh) -> tuple[set[str], list[str], int, list[str]]:
    """What this rank holds, which of its blocks ran in a step, how many random numbers were drawn in the first step, of which each
    block draws one, and which blocks may be compiled one by one."""
    step, ran = new_step(mesh, ("untied", {"sizes": [1, 3]}, {})), list[str]()
    names = {module: name for name, module in step.model.named_modules()}
    act: Any = step.act
    for module, name in names.items():
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    for block in blocks(step.model):
        block.register_forward_hook(drawing)
    step(batch(0))
    following = torch.rand(()).item()
    rng.seed_step(step._seed, 0, 0)
    drawn = torch.rand(100).tolist().index(following)
    ran.clear()
    step(batch(1))
    for training in (False, True):
        step.model.train(training)
        stage: Any = act.stages.module(mesh.rank)
        assert stage.training is stage.blocks.training is training
    held = {".".join(name.split(".")[:2]) for name, _ in step.model.named_parameters()}
    went = [name for name in ran if name.count(".") == 1 and name.startswith("blocks.")]
    return held, went, drawn, [names[block] for block in blocks(step.model)]


def test_a_rank_holds_and_runs_its_own_blocks_alone() -> None:
    (first, ran, *one), (last, went, *others) = on_ranks({"pipeline": 2}, remains)
    assert first == {"blocks.0", "embedding.weight"} and ran == ["blocks.0"] * 4 and one == [4, ["blocks.0"]]
    assert last == {"blocks.1", "blocks.2", "blocks.3", "norm.weight", "norm.bias", "head.weight"}
    assert went == ["blocks.1", "blocks.2", "blocks.3"] * 4 and others == [12, ["blocks.1", "blocks.2", "blocks.3"]]


def test_a_pipeline_of_one_rank_is_the_whole_model() -> None:
    model = Transformer()
    names = [name for name, _ in model.named_parameters()]
    step = Step(model, mean_loss, StepConfig(), Mesh({}), act=Pipeline(model, Mesh({})))
    assert isinstance(step.act, Whole) and [name for name, _ in step.model.named_parameters()] == names


def without(mesh: Mesh) -> str:
    with pytest.raises(ConfigError) as refusal:
        Step(Transformer(), mean_loss, StepConfig(), mesh)
    return str(refusal.value)


def test_stages_without_a_schedule_are_refused() -> None:
    assert all(text.startswith("mesh.pipeline is 2, but the step has no schedule") for text in on_ranks({"pipeline": 2}, without))
