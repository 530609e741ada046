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
WIDE = {name: tuple(value) if isinstance(value, list) else value for name, value in STORED["config"].items()}
WIDE["hotness"] = 4, 2, 3, 8, 2, 5  # of the longest bags
CRITEO = json.loads(gzip.decompress((DATA / "dlrm/criteo_multihot.json.gz").read_bytes()))
ROWS, HOTNESS = ([table[key] for table in CRITEO["tables"]] for key in ("rows", "hotness"))


def load_model(dtype: torch.dtype = torch.float64, **settings: Any) -> DLRM:
    model = DLRM(DLRMConfig(**{**WIDE, **settings}))
    model.load_state_dict(load_tensors("dlrm/weights"), strict=False)
    return model.to(dtype)


def load_batches(cfg: DLRMConfig, dtype: torch.dtype = torch.float64) -> list[tuple[Batch, dict[str, Tensor]]]:
    """Return batches, and their stored results by name."""
    arrays, result = load_tensors("dlrm/batches"), []
    for number in range(3):
        stored = {name[3:]: x for name, x in arrays.items() if name.startswith(f"b{number}/")}
        ids, offsets = ([stored[f"{kind}{t}"].long() for t in range(len(cfg.rows))] for kind in ("ids", "offsets"))
        batch = Batch(stored["dense"].to(dtype), pad_bags(ids, offsets, cfg.rows, cfg.hotness), stored["label"].to(dtype))
        result.append((batch, stored))
    return result


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_logits_losses_and_gradients(dtype: torch.dtype, tolerance: float) -> None:
    model = load_model(dtype)
    names, (group,) = {name: p for name, p in model.named_parameters() if p.requires_grad}, model.embedding.groups
    close, close_norms = {"rtol": 0.0, "atol": max(tolerance / 10, 1e-12)}, {"rel": max(tolerance, 1e-10), "abs": tolerance / 10}
    for (batch, stored), expected in zip(load_batches(model.cfg, dtype), STORED["batches"], strict=True):
        with torch.no_grad():
            torch.testing.assert_close(model(batch.dense, batch.ids).double(), stored["logits_f64"], rtol=0, atol=tolerance)
        model.zero_grad()
        value = loss(model, batch)["loss"]
        assert value.item() == pytest.approx(expected["f64"]["loss"], abs=max(tolerance / 10, 1e-12))
        value.backward()
        gradients = {name: p.grad.double() for name, p in names.items() if p.grad is not None}
        ids, grad = group.saved.pop()
        dense = dense_gradients(group.layout, ids, grad.unflatten(1, (-1, model.cfg.dim))).double()
        gradients |= {f"embedding.{t}.weight": part for t, part in enumerate(dense.split(model.cfg.rows))}
        assert {name: g.norm().item() for name, g in gradients.items()} == pytest.approx(expected["f64"]["grad_l2"], **close_norms)
        for name in (name for name in stored if name.startswith("grad/")):
            torch.testing.assert_close(gradients[name[5:]], stored[name], **close)
        for t in (t for t in range(len(model.cfg.rows)) if f"touched{t}" in stored):
            full = torch.zeros_like(gradients[f"embedding.{t}.weight"])
            full[stored[f"touched{t}"].long()] = stored[f"grad_rows{t}"]
            torch.testing.assert_close(gradients[f"embedding.{t}.weight"], full, **close)


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
    for name, value in stored.items():
        actual = state[name.replace("state/", "").replace("weight", "sum") if name.startswith("state/") else name]
        torch.testing.assert_close(actual.view_as(value), value, rtol=1e-9, atol=1e-10)


def test_auc_is_exact_also_with_ties() -> None:
    arrays = load_tensors("dlrm/auc", torch.float32)
    for case, expected in load_json("dlrm/auc").items():
        scores, labels = arrays[f"{case}/scores"], arrays[f"{case}/labels"]
        assert auc(scores, labels) == Fraction(expected["numerator"], expected["denominator"])
    for factor, label, message in ((1, 0, "both classes"), (torch.nan, 1, "are NaN"), (1, 2, "labels 0 and 1")):
        with pytest.raises(DataError, match=message):
            auc(scores * factor, labels * label)


def test_the_benchmark_has_the_parameters_and_names_of_torchrec() -> None:
    with deferred(), torch.device("meta"):
        model = DLRM()
    sizes = {name: tuple(p.shape) for name, p in model.named_parameters() if not name.endswith(".sum")}
    ours = {theirs: sizes[name] for name, theirs in torchrec_names(model.cfg).items()}
    assert ours == {name: tuple(shape) for name, shape in CRITEO["torchrec_tensors"]} and len(ours) == len(sizes)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == CRITEO["dense_parameters"]["total"]
    assert (list(model.cfg.rows), list(model.cfg.hotness)) == (ROWS, HOTNESS)


def test_weights_of_torchrec_load_and_are_written(tmp_path: Path) -> None:
    model = load_model(torch.float32)
    state, path = model.state_dict(), tmp_path / "theirs.pt"
    torch.save({STORED["torchrec_names"][name]: x for name, x in state.items() if not name.endswith(".sum")}, path)
    model.save(tmp_path / "written.pt", form="torchrec")
    model.save(tmp_path / "model.safetensors")
    for name, cfg in (("theirs.pt", model.cfg), ("written.pt", model.cfg), ("model.safetensors", None)):
        loaded = DLRM.load(tmp_path / name, cfg)
        assert all(torch.equal(x, state[key]) for key, x in loaded.state_dict().items()) and loaded.cfg == model.cfg
        assert not any(hasattr(p, "origin") for p in loaded.embedding.parameters()), "a checkpoint holds trained tables"
    with pytest.raises(CheckpointError, match="has no settings"):
        DLRM.load(path)
    with pytest.raises(CheckpointError, match="not the weights of a DLRM"):
        DLRM.load(path, DLRMConfig(**{**WIDE, "dim": 16, "bottom": (16,)}))


@pytest.mark.parametrize("plan", CRITEO["nvidia_plans"], ids=lambda plan: plan["config"])
def test_plans_of_the_benchmark_are_no_slower_than_those_of_nvidia(plan: dict[str, Any]) -> None:
    memory, network = plan["memory_gb_per_bucket"] * 1e9, plan["mem_comm_bw_ratio"] / plan["mem_comm_work_ratio"]
    ours = plan_shards(ROWS, HOTNESS, 128, ranks=plan["buckets"], memory=memory, batch=55_296, network=network,
                       replicated_bytes=plan["data_parallel_threshold_gb"] * 1e9)  # fmt: skip
    assert list(ours.replicated) == plan["data_parallel_tables"]
    ranks = range(ours.ranks)
    costs = [ours.cost(rank) - network * ours.ids(rank) / 128 for rank in ranks]  # NVIDIA's, without ids
    assert max(costs) <= plan["max_cost"] and max(map(ours.memory, ranks)) <= memory
    replicated = sum(ROWS[t] for t in ours.replicated) * 128 * 8
    assert sum(map(ours.memory, ranks)) == 8 * CRITEO["embedding_parameters"] + (ours.ranks - 1) * replicated


def test_rows_of_blocks_and_plans_that_do_not_fit() -> None:
    plan = plan_shards([40_000_000], [1], 128, ranks=4, memory=12e9, batch=4096, rowwise=True)
    first, last = CRITEO["tables"][0]["rows_per_shard"]["4"]
    assert [shard.height for shard in plan.shards] == [first] * 3 + [last]
    with pytest.raises(ConfigError, match="209.1 GB, but 2 ranks with 60 GB each cannot hold them; 4 ranks would hold them"):
        plan_shards(ROWS, HOTNESS, 128, ranks=2, memory=60e9, batch=55_296)
    lower, upper = (0, 5), (5, 10)
    for shards in ([(lower, 0)], [((0, 6), 0), (upper, 1)], [(lower, 1), (upper, 1)], [((0, 10), 2)]):
        with pytest.raises(ConfigError, match="expected 10 rows and 8 columns once, each shard on another of 2 ranks"):
            ShardingPlan((10,), (1,), 8, 2, tuple(Shard(0, rows, (0, 8), owner) for rows, owner in shards))


@pytest.mark.parametrize("case", load_json("dlrm/lr_schedule"), ids=lambda case: case["name"])
def test_schedules_of_the_benchmark(case: dict[str, Any]) -> None:
    """A gap between warm-up and decay, in which the reference does not reach the rate, and its last rate after the decay differ."""
    warmup, decay, start = case["warmup_steps"], case["decay_steps"], case["decay_start"]
    settings: dict[str, Any] = {"unit": "steps", "warmup": warmup, "first_step": 1}
    lr = make_lr_schedule(ScheduleConfig(**settings, **({"decay": "polynomial", "length": decay} if decay else {})),
                          case["base_lr"], 30, 30)  # fmt: skip
    end = start + decay if start == warmup and decay else warmup if decay else 31
    expected = case["lr_of_step_1_to_30"][: end - 1]
    assert [lr(number) for number in range(len(expected))] == pytest.approx(expected, rel=1e-9)
