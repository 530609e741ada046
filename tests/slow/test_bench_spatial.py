"""What the documents say of cut volumes: bytes by the formula, and memory of a rank."""

import json

import pytest

from hpcai.cli.bench import main
from hpcai.cli.bench.spatial import formula, work
from hpcai.models.unet3d import UNet3DConfig


def measured(capsys: pytest.CaptureFixture[str], *words: str) -> dict[int, dict]:
    assert main(["spatial", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    return {row["ranks"]: row for row in found["ranks"]}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_send_what_the_formula_says_and_keep_their_share(capsys: pytest.CaptureFixture[str]) -> None:
    rows = measured(capsys, "--size", "64", "--divide", "8", "--ranks", "1", "2", "4", "8", "--repeats", "1")
    for ranks, row in rows.items():
        assert row["sent_mb"] == row["formula_mb"] and (row["sent_mb"] > 0) == (ranks > 1), row
    assert rows[1]["share"] == 1 and rows[2]["share"] < 0.53 and rows[4]["share"] <= 0.30 and rows[8]["share"] < 0.2, rows


def test_the_cost_model_of_the_benchmark() -> None:
    """Level by level: 128, 64, 32 and 16 slices are cut over 8 ranks, 8 and 4 are not."""
    cfg = UNet3DConfig()
    assert work(cfg, 1) == 1 and work(cfg, 2) == pytest.approx(0.5) and 0.25 < work(cfg, 4) < 0.251 and 0.135 < work(cfg, 8) < 0.137
    assert work(cfg, 8, least=4) == pytest.approx(0.19, abs=1e-3), "the published split: 16 slices are not cut either"
    top = 128 * 128 * (2 * 1 + 4 * 32 + 4 * 64 + 4 * 32)
    only = UNet3DConfig(filters=(32,), window=(128, 128, 128))
    assert formula(only, 2) == top + 64 * 64 * 4 * 32 + 128 * 128 * 2 * 32
    assert formula(only, 1) == 0
