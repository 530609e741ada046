"""Scores of folded chains: invariance under rotation and translation, not under reflection; limits and fractions."""

import math

import pytest
import torch

from hpcai.models.openfold import OpenFold, OpenFoldConfig, predict_structures, score
from hpcai.models.openfold.objective import lddt
from hpcai.models.openfold.scores import drmsd, gdt, superpose
from tests.proteins import SMALL, random_batch


def rotated(x: torch.Tensor, mirror: bool = False) -> torch.Tensor:
    q = torch.linalg.qr(torch.randn(3, 3, dtype=x.dtype))[0]
    q = q * torch.det(q).sign()
    return x @ (-q if mirror else q) + torch.tensor([4.0, -7.0, 11.0], dtype=x.dtype)


@pytest.fixture
def chain() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    mask = (torch.rand(2, 30) > 0.2).double()
    return torch.randn(2, 30, 3, dtype=torch.float64) * 8, mask


def test_a_moved_chain_is_superposed_and_a_mirrored_one_is_not(chain: tuple[torch.Tensor, torch.Tensor]) -> None:
    true, mask = chain
    moved = torch.where(mask[..., None] > 0, rotated(true), 1e4)  # unresolved atoms have no weight
    fitted, resolved = superpose(moved, true, mask), mask > 0
    torch.testing.assert_close(fitted[resolved], true[resolved], rtol=0, atol=1e-9)
    assert gdt(fitted, true, mask).tolist() == [1, 1]
    mirrored = rotated(true, mirror=True)
    assert drmsd(mirrored, true, mask).max() < 1e-6 and lddt(mirrored, true, mask).min() > 1 - 1e-9, "distances are the same"
    assert gdt(superpose(mirrored, true, mask), true, mask).max() < 0.6


def test_limits_and_fractions() -> None:
    true = torch.zeros(1, 5, 3)
    fitted = true.clone()
    fitted[0, :, 0] = torch.tensor([0.4, 0.9, 3.0, 7.9, 99.0])
    mask = torch.tensor([[1.0, 1, 1, 1, 0]])
    assert gdt(fitted, true, mask).item() == pytest.approx((2 + 2 + 3 + 4) / 16)  # within 1, 2, 4 and 8
    assert gdt(fitted, true, mask, (0.5, 1, 2, 4)).item() == pytest.approx((1 + 2 + 2 + 3) / 16)
    # True distances between the four are 0: the error of each pair is its distance.
    off = torch.pdist(fitted[0, :4]).square().mean().sqrt()
    assert drmsd(fitted, true, mask).item() == pytest.approx(off.item())


def test_scores_and_rows_of_a_network() -> None:
    torch.manual_seed(0)
    model = OpenFold(OpenFoldConfig.preset("tiny")).double().eval()
    features = random_batch([7, 5], SMALL.model_copy(update={"crop": 8}))
    features["index"] = torch.tensor([[4, 4], [9, 9]])
    features["all_atom_mask"][0, 2, 1] = 0
    scores = score(model, features)
    assert set(scores) >= {"lddt", "drmsd", "gdt_ts", "gdt_ha", "confidence", "distogram", "masked_msa", "fape"}
    assert all(math.isfinite(value.item()) for value in scores.values())
    assert scores["distogram"].item() == pytest.approx(math.log(64), rel=1e-6), "heads begin with zeros"
    assert scores["confidence"].item() == pytest.approx(50)
    rows = predict_structures(model, features)
    assert rows["index"].tolist() == [4, 9] and rows["residues"].tolist() == [7, 5]
    assert rows["predicted"].shape == rows["true"].shape == (12, 37, 3) and rows["distance"].shape == (7 * 7 + 5 * 5,)
    unresolved = rows["mask"][:, 1] == 0
    assert unresolved.any() and torch.equal(rows["lddt"].isnan(), unresolved)
