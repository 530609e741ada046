"""What ensembles are worth is the same however samples lie in batches, and is that of the scores of all of them."""

import torch

from hpcai.models.diffusion import ensemble, measure, score, scores
from hpcai.models.diffusion.objective import Batch
from tests.unit.models.diffusion.test_model import batch, model, some


def finished(*found: dict[str, object]) -> dict[str, float]:
    """As an evaluation adds up what it is told of each batch."""
    told: dict[str, float] = {}
    for name in found[0]:
        if name == "loss":
            continue
        totals = [one[name] for one in found]
        sums = [torch.stack([total[0][k] for total in totals]).sum(0) for k in range(len(totals[0][0]))]  # type: ignore[index, arg-type]
        told |= totals[0][1](*sums)  # type: ignore[index]
    return told


def test_ensembles_are_measured_beside_the_loss() -> None:
    made, whole = model("flow"), batch(6)
    told = finished(measure(made, whole, members=4))
    parts = [measure(made, some(whole, which), members=4) for which in torch.tensor([5, 2, 0, 1, 4, 3]).split(2)]
    assert set(told) == {"crps", "rmse", "spread_over_skill", "coverage_90", "spectrum_error", "ks"} | set(
        finished({"levels": score(made, whole)["levels"]})
    )
    low = finished(measure(made, whole, members=2, place=0.0))
    assert low["loss_3"] == finished({"levels": score(made, whole, 0.0)["levels"]})["loss_3"] != told["loss_3"]
    for name, value in finished(*parts).items():
        torch.testing.assert_close(value, told[name], rtol=1e-8, atol=1e-10, msg=name)
    rows = ensemble(made, whole, members=4)
    members, truth = rows["members"].transpose(0, 1), rows["truth"]
    assert abs(scores.crps(members, truth, fair=True).mean().item() - told["crps"]) < 1e-10
    spread = members.var(0).mean().sqrt() / (members.mean(0) - truth).square().mean().sqrt() * (5 / 4) ** 0.5
    assert abs(spread.item() - told["spread_over_skill"]) < 1e-10


def test_members_like_the_truth_have_its_power_and_values() -> None:
    made, whole = model("flow"), batch(6)
    made.sample = lambda condition, members, **words: whole.sample.expand(members, *whole.sample.shape)  # type: ignore[method-assign]
    told = finished(measure(made, Batch(*whole), members=3))
    assert max(told[name] for name in ("crps", "rmse", "spectrum_error", "ks")) < 1e-15
