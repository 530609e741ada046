"""DLRM-dcnv2, Adagrad, AUC, plans and schedules agree with stored results of the references (tests/data/dlrm)."""

import gzip
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcai import dist, train
from hpcai.errors import CheckpointError, ConfigError, DataError
from hpcai.kernels.embedding_update import dense_gradients
from hpcai.models.dlrm import DLRM, Batch, DLRMConfig, auc, loss
from hpcai.models.dlrm.load import torchrec_names
from hpcai.nn.deferred_init import deferred
from hpcai.nn.embedding_bag import pad_bags
from hpcai.parallel.embedding_plan import Shard, ShardingPlan, plan_shards
from hpcai.settings import ScheduleConfig, StepConfig
from hpcai.train.schedule import make_lr_schedule
from tests.reference_data import DATA, load_json, load_tensors

STORED = load_json("dlrm/model")
CRITEO = json.loads(gzip.decompress((DATA / "dlrm/criteo_multihot.json.gz").read_bytes()))
ROWS, HOTNESS = ([table[key] for table in CRITEO["tables"]] for key in ("rows", "hotness"))
WIDE = {name: tuple(value) if isinstance(value, list) else value for name, value in STORED["config"].items()}
WIDE["hotness"] = 4, 2, 3, 8, 2, 5  # of the longest bags


def load_model(dtype: torch.dtype = torch.float64, **settings: Any) -> DLRM:
    model = DLRM(DLRMConfig(**{**WIDE, **settings}))
    model.load_state_dict(load_tensors("dlrm/weights"), strict=False)
    return model.to(dtype)


def load_batches(cfg: DLRMConfig, dtype: torch.dtype = torch.float64) -> list[tuple[Batch, dict[str, Tensor]]]:
    """Return batches, and their stored results by name."""
    arrays = load_tensors("dlrm/batches")
    result = []
    for number in range(3):
        stored = {name.removeprefix(f"b{number}/"): x for name, x in arrays.items() if name.startswith(f"b{number}/")}
        bags = [[stored[f"{kind}{t}"].long() for t in range(len(cfg.rows))] for kind in ("ids", "offsets")]
        ids = pad_bags(*bags, cfg.rows, cfg.hotness)
        result.append((Batch(stored["dense"].to(dtype), ids, stored["label"].to(dtype)), stored))
    return result


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_logits_losses_and_gradients(dtype: torch.dtype, tolerance: float) -> None:
    model = load_model(dtype)
    names, (group,) = {name: p for name, p in model.named_parameters() if p.requires_grad}, model.embedding.groups
    for number, (batch, stored) in enumerate(load_batches(model.cfg, dtype)):
        expected = STORED["batches"][number]["f64"]
        with torch.no_grad():
            torch.testing.assert_close(model(batch.dense, batch.ids).double(), stored["logits_f64"], rtol=0, atol=tolerance)
        values = loss(model, batch)
        assert values["loss"].item() == pytest.approx(expected["loss"], abs=max(tolerance / 10, 1e-12))
        model.zero_grad()
        values["loss"].backward()
        norms = {name: p.grad.norm().item() for name, p in names.items() if p.grad is not None}
        ids, grad = group.saved.pop()
        dense = dense_gradients(group.layout, ids, grad.unflatten(1, (-1, model.cfg.dim))).double()
        for t, gradient in enumerate(dense.split(model.cfg.rows)):
            norms[f"embedding.{t}.weight"] = gradient.norm().item()
            if number != 1:
                touched = stored[f"touched{t}"].long()
                torch.testing.assert_close(gradient[touched], stored[f"grad_rows{t}"], rtol=0, atol=max(tolerance / 10, 1e-12))
                assert gradient.count_nonzero() <= touched.numel() * model.cfg.dim, "all other rows are 0"
        assert norms == pytest.approx(expected["grad_l2"], rel=max(tolerance, 1e-10), abs=1e-6 * (dtype == torch.float32))
        if number == 0:
            for name, parameter in names.items():
                assert parameter.grad is not None
                torch.testing.assert_close(parameter.grad.double(), stored[f"grad/{name}"], rtol=0, atol=tolerance / 10)


@pytest.mark.parametrize("kind", ["elementwise", "rowwise"])
def test_three_steps_of_adagrad(kind: str) -> None:
    model, results, case = load_model(adagrad_rowwise=kind == "rowwise"), load_tensors("dlrm/adagrad"), STORED[f"adagrad_{kind}"]
    cfg = StepConfig(optimizer="adagrad", lr=case["lr"], eps=case["eps"], precision="fp64")
    step = train.Step(model, loss, cfg, dist.single_process())
    losses = [step(batch)["loss"].item() for batch, _ in load_batches(model.cfg)]
    assert losses == pytest.approx(case["losses"], abs=1e-12)
    state = model.state_dict()
    norms = {name: value.norm().item() for name, value in state.items() if not name.endswith(".sum")}
    assert norms == pytest.approx(case["param_l2_after_3"], rel=1e-10)
    stored = {name.removeprefix(f"{kind}/"): value for name, value in results.items() if name.startswith(f"{kind}/")}
    assert len(stored) > 11
    for name, value in stored.items():
        actual = state[name.replace("state/", "").replace("weight", "sum") if name.startswith("state/") else name]
        torch.testing.assert_close(actual.view_as(value), value, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("case", load_json("dlrm/auc"))
def test_auc_is_exact_also_with_ties(case: str) -> None:
    arrays, expected = load_tensors("dlrm/auc", torch.float32), load_json("dlrm/auc")[case]
    value = auc(arrays[f"{case}/scores"], arrays[f"{case}/labels"])
    assert value == Fraction(expected["numerator"], expected["denominator"])
    assert float(value) == pytest.approx(expected["auc"], abs=1e-15)
    with pytest.raises(DataError, match="both classes"):
        auc(arrays[f"{case}/scores"], arrays[f"{case}/labels"] * 0)
    with pytest.raises(DataError, match="1 of .* NaN"):
        auc(arrays[f"{case}/scores"].index_fill(0, torch.tensor([3]), torch.nan), arrays[f"{case}/labels"])


def test_the_benchmark_has_the_parameters_and_names_of_torchrec() -> None:
    with deferred(), torch.device("meta"):
        model = DLRM()
    sizes = {name: tuple(p.shape) for name, p in model.named_parameters() if not name.endswith(".sum")}
    ours = {theirs: sizes[name] for name, theirs in torchrec_names(model.cfg).items()}
    assert ours == {name: tuple(shape) for name, shape in CRITEO["torchrec_tensors"]} and len(ours) == len(sizes)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == CRITEO["dense_parameters"]["total"] == 16_044_545
    assert (list(model.cfg.rows), list(model.cfg.hotness)) == (ROWS, HOTNESS)


def test_weights_of_torchrec_load_and_are_written(tmp_path: Path) -> None:
    model = load_model(torch.float32)
    theirs = {STORED["torchrec_names"][name]: x for name, x in model.state_dict().items() if not name.endswith(".sum")}
    torch.save(theirs, tmp_path / "theirs.pt")
    loaded = DLRM.load(tmp_path / "theirs.pt", model.cfg)
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in loaded.state_dict().items())
    for form, path in (("torchrec", tmp_path / "written.pt"), ("hpcai", tmp_path / "model.safetensors")):
        model.save(path, form=form)
        again = DLRM.load(path, None if form == "hpcai" else model.cfg)
        assert all(torch.equal(x, model.state_dict()[name]) for name, x in again.state_dict().items())
    with pytest.raises(CheckpointError, match="has no settings"):
        DLRM.load(tmp_path / "theirs.pt")
    with pytest.raises(CheckpointError, match="not the weights of a DLRM"):
        DLRM.load(tmp_path / "theirs.pt", DLRMConfig(**{**WIDE, "dim": 16, "bottom": (16,)}))


@pytest.mark.parametrize("plan", CRITEO["nvidia_plans"], ids=lambda plan: plan["config"])
def test_plans_of_the_benchmark_are_no_slower_than_those_of_nvidia(plan: dict[str, Any]) -> None:
    memory, network = plan["memory_gb_per_bucket"] * 1e9, plan["mem_comm_bw_ratio"] / plan["mem_comm_work_ratio"]
    ours = plan_shards(ROWS, HOTNESS, 128, ranks=plan["buckets"], memory=memory, batch=55_296, network=network,
                       replicated_bytes=plan["data_parallel_threshold_gb"] * 1e9)  # fmt: skip
    assert list(ours.replicated) == plan["data_parallel_tables"]
    costs = []
    for rank in range(ours.ranks):
        shards = ours.owned(rank)
        lookups = sum(HOTNESS[s.table] * (s.rows[1] - s.rows[0]) / ROWS[s.table] * (s.columns[1] - s.columns[0]) for s in shards)
        costs.append(lookups / 128 + network * ours.width(rank) / 128)  # NVIDIA's, without ids
    assert max(costs) <= plan["max_cost"] and max(map(ours.memory, range(ours.ranks))) <= memory
    assert max(map(ours.memory, range(ours.ranks))) / 1e9 < 1.2 * max(plan["memory_gb"]) + 45
    replicated = sum(ROWS[t] for t in ours.replicated) * 128 * 8
    assert sum(map(ours.memory, range(ours.ranks))) == 2 * CRITEO["embedding_parameters"] * 4 + (ours.ranks - 1) * replicated


def test_rows_of_blocks_and_tables_that_do_not_fit() -> None:
    plan = plan_shards([40_000_000], [1], 128, ranks=4, memory=12e9, batch=4096, rowwise=True)
    rows = CRITEO["tables"][0]["rows_per_shard"]["4"]
    assert [shard.rows[1] - shard.rows[0] for shard in plan.shards] == [rows[0]] * 3 + [rows[1]]
    with pytest.raises(ConfigError, match="209.1 GB, but 2 ranks with 60 GB each cannot hold them; 4 ranks would hold them"):
        plan_shards(ROWS, HOTNESS, 128, ranks=2, memory=60e9, batch=55_296)
    for shards, message in (
        ([Shard(0, (0, 5), (0, 8), 0)], "do not cover"), ([Shard(0, (0, 6), (0, 8), 0), Shard(0, (5, 10), (0, 8), 1)], "do not"),
        ([Shard(0, (0, 5), (0, 8), 1), Shard(0, (5, 10), (0, 8), 1)], "different ones"), ([Shard(0, (0, 10), (0, 8), 2)], "below 2"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            ShardingPlan((10,), (1,), 8, 2, tuple(shards))


@pytest.mark.parametrize("case", load_json("dlrm/lr_schedule"), ids=lambda case: case["name"])
def test_schedules_of_the_benchmark(case: dict[str, Any]) -> None:
    """Between warm-up and decay the reference does not reach the rate, and after the decay it keeps the last one."""
    warmup, decay, start = case["warmup_steps"], case["decay_steps"], case["decay_start"]
    settings: dict[str, Any] = {"unit": "steps", "warmup": warmup, "first_step": 1}
    if decay:
        settings |= {"decay": "polynomial", "length": decay}
    lr = make_lr_schedule(ScheduleConfig(**settings), case["base_lr"], 30, 30)
    for number, expected in enumerate(case["lr_of_step_1_to_30"], 1):
        if not decay or warmup <= number < start + decay and warmup == start or number < warmup:
            assert lr(number - 1) == pytest.approx(expected, rel=1e-9), number
