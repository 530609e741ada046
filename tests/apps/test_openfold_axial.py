"""What ``hpcai bench openfold axial`` says of a block that is cut."""

import pytest

from apps.openfold.axial import by_channels, by_gathers
from hpcai import config
from hpcai.cli import trial
from hpcai.models.openfold import OpenFoldConfig

pytestmark = pytest.mark.usefixtures("one_thread")


def measured(part: str, *words: str) -> list[dict[str, float]]:
    subject = trial.find("openfold")
    tiny = [*subject.tiny, "features={crop: 25, clusters: 7, extra: 8, templates: 1}"]
    return list(subject.parts[part](config.load(subject.settings, None, [*tiny, *words]), 1))


def test_a_cut_block_keeps_half_and_sends_what_the_formula_says() -> None:
    whole, half = measured("axial", "mesh.axial=2")
    assert [row["ranks"] for row in (whole, half)] == [1, 2] and whole.keys() == half.keys()
    assert whole["forward"] == whole["backward"] == whole["formula"] == whole["messages"] == 0
    # 25 residues are cut to 13, 7 sequences to 4; widths are those of the app's tiny network.
    moved = 2 * 32 * 4 * 13 + 2 * 16 * 13 * 13 + 6 * 16 // 2 * 13 * 25
    assert half["formula"] == 4 * (moved + (2 + 2 * 2) * 13 * 25 + 8 * 7 * 13)
    assert half["forward"] == half["backward"] == half["formula"]
    assert half["messages"] == 2 * (4 + 4 + 4), "moves of alignment and pairs, of two products, and gathers, each way"
    assert whole["kept_share"] == 1 and 0.5 < half["kept_share"] < 0.6 and 0 < half["kept_mb"] < whole["kept_mb"]
    assert min(row["cpu_s"] for row in (whole, half)) > 0 < half["cpu_share"]


@pytest.mark.parametrize(("ranks", "channels", "gathers"), [(2, 44.0, 44.0), (4, 34.6, 47.2), (8, 22.0, 44.0)])
def test_the_table_of_the_published_network(ranks: int, channels: float, gathers: float) -> None:
    """MB in bfloat16 for 128 sequences and 256 residues, as docs/performance.md has them."""
    found = [2 * count(OpenFoldConfig(), 128, 256, ranks) / 1e6 for count in (by_channels, by_gathers)]
    assert found == pytest.approx([channels, gathers], abs=0.05)
