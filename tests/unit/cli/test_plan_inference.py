"""Plans of the generation of texts: published ratios, and what their frontier must be."""

import json
from pathlib import Path

import pytest

from apps.llm.inference import Planner, check, frontier
from apps.llm.settings import Config
from hpcai import config
from hpcai.cli import plan
from hpcai.errors import ConfigError
from hpcai.plan.machines import find_machine

SETTINGS = ["model={width: 4096, layers: 32, heads: 32, key_heads: 8, inner: 14336, vocabulary: 128256, positions: 8192}"]


def test_published_ratios_are_planned_within_a_seventh() -> None:
    rows = check()
    assert len(rows) == 3 and all(abs(row["planned"] / row["published"] - 1) < 1 / 7 for row in rows)


def test_a_frontier_has_the_best_latency_and_the_best_throughput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planner = Planner(config.load(Config, None, SETTINGS), find_machine("h100"), (1024, 256))
    plans = [each for mesh in planner.meshes(8) for each in planner.plan(*mesh)]
    best = frontier(plans)
    assert {(each.tensor, each.pipeline) for each in plans} >= {(1, 1), (8, 1), (1, 8), (2, 4)}
    assert min(plans, key=lambda each: each.latency) == best[0] and max(plans, key=lambda each: each.throughput) == best[-1]
    assert all(a.latency < b.latency and a.throughput < b.throughput for a, b in zip(best, best[1:]))
    assert all(sum(a.latency >= b.latency and a.throughput <= b.throughput for b in plans) == 1 for a in best)
    unsharded = [each for each in plans if (each.tensor, each.pipeline) == (1, 1)]
    assert [each.texts for each in unsharded] == [2**n for n in range(len(unsharded))] and unsharded[-1].memory <= 0.9 * 80e9
    cache = (unsharded[-1].memory - unsharded[-2].memory) / (unsharded[-1].texts - unsharded[-2].texts) / (1024 + 256)
    assert cache == pytest.approx(128 * 1024), "bytes of a token of Llama 3.1 8B, in bfloat16"
    weights = 2 * planner.model.num_parameters / find_machine("h100").bandwidth
    assert 1 < unsharded[0].latency / weights < 1.2, "one text reads the weights for each token"
    options = ["--machine", "h100", "--gpus", "8", "1", "--lengths", "1024", "256"]
    assert plan.main(["llm", "--inference", *SETTINGS, *options, "--json", "--picture", str(tmp_path / "frontier.png")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [each["throughput"] for each in printed["8"]] == [each.throughput for each in best]
    assert (tmp_path / "frontier.png").read_bytes()[:4] == b"\x89PNG"
    assert plan.main(["llm", "--inference", *SETTINGS, *options]) == 0
    assert f"{1e3 * best[0].latency:.1f}" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="texts of 8000 \\+ 200 tokens .* model.positions is 8192"):
        Planner(config.load(Config, None, SETTINGS), find_machine("h100"), (8000, 200))
