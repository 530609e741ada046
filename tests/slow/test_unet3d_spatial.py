"""What the documents say of cut volumes: bytes by the formula, and memory of a rank."""

import json

import pytest

from apps.unet3d.spatial import formula, work
from hpcai.cli.bench import main
from hpcai.models.unet3d import UNet3DConfig


def measured(capsys: pytest.CaptureFixture[str], *words: str) -> dict[int, dict]:
    assert main(["unet3d", "spatial", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    return {row["ranks"]: row for row in found["spatial"]}


MOST = {1: 1.0, 2: 0.53, 4: 0.30, 8: 0.2}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [(1, 2), pytest.param((1, 2, 4, 8), marks=pytest.mark.claim)], ids=str)
def test_ranks_send_what_the_formula_says_and_keep_their_share(ranks: tuple[int, ...], capsys: pytest.CaptureFixture[str]) -> None:
    rows = measured(capsys, "model.filters=[4, 8, 16, 32, 40]", f"mesh.depth={ranks[-1]}", "--repeats", "1")
    assert tuple(rows) == ranks
    for count, row in rows.items():
        assert row["sent_mb"] == row["formula_mb"] and (row["sent_mb"] > 0) == (count > 1), row
        assert row["share"] <= MOST[count], row


def test_the_cost_model_of_the_benchmark() -> None:
    """Level by level: 128, 64, 32 and 16 slices are cut over 8 ranks, 8 and 4 are not."""
    cfg = UNet3DConfig()
    assert work(cfg, 1) == 1 and work(cfg, 2) == pytest.approx(0.5) and 0.25 < work(cfg, 4) < 0.251 and 0.135 < work(cfg, 8) < 0.137
    assert work(cfg, 8, least=4) == pytest.approx(0.19, abs=1e-3), "the published split: 16 slices are not cut either"
    top = 128 * 128 * (2 * 1 + 4 * 32 + 4 * 64 + 4 * 32)
    only = UNet3DConfig(filters=(32,), window=(128, 128, 128))
    assert formula(only, 2) == top + 64 * 64 * 4 * 32 + 128 * 128 * 2 * 32
    assert formula(only, 1) == 0
