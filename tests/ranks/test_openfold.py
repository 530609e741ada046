"""OpenFold sharded over ``axial``: outputs, losses, gradients and steps equal those of one process."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hpcai.dist.collectives import all_reduce_
from hpcai.dist.launch import single_process
from hpcai.dist.mesh import Mesh
from hpcai.kernels import attention
from hpcai.models.openfold import ObjectiveConfig, OpenFold, OpenFoldConfig, loss, parallelize, residues
from hpcai.models.openfold.features import FeatureConfig
from hpcai.plan.step_trace import StepTracer
from hpcai.settings import StepConfig
from hpcai.train.step import Step
from tests import proteins
from tests.ranks.launch import on_ranks
from tests.ranks.shards import check_equal, gather_full, local_shards

# 7 clusters with their templates, 7 extra rows, 13 residues: none divides into 2 or 4.
FEATURES = FeatureConfig(crop=13, clusters=5, extra=7, templates=2, recycles=2)
ALL = ObjectiveConfig(resolved=0.01, violation=1.0, aligned_error=0.1)


def network(**overrides: Any) -> OpenFold:
    """Return a network without zero weights; a new one has zeros in the last layer of each branch."""
    torch.manual_seed(0)
    model = OpenFold(OpenFoldConfig.preset("tiny", heads={"plddt": 16, "tm": True}, **overrides))
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model.double()


@cache
def protein(passes: int) -> dict[str, Tensor]:
    return proteins.random_batch([13, 11], FEATURES, passes=passes)


def objective(model: Any, batch: Any) -> dict[str, Tensor]:
    return loss(model, batch, ALL)


def take_shard(full: Tensor, rank: int, ranks: int, dim: int) -> Tensor:
    size = -(-full.shape[dim] // ranks)
    return full.narrow(dim, rank * size, min(size, full.shape[dim] - rank * size))


def values_and_gradients(mesh: Mesh, passes: int, checkpoint: bool) -> tuple[dict[str, float], dict[str, np.ndarray], list[Tensor]]:
    """Return values, gradients of parameters and of the MSA, summed over a replica, and some outputs; with dropout."""
    model = parallelize(network(checkpoint=checkpoint), mesh)
    batch = dict(protein(passes))
    batch["msa_feat"] = batch["msa_feat"].clone().requires_grad_()
    torch.manual_seed(7)
    values = objective(model, batch)
    values["loss"].backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients["msa_feat"] = batch["msa_feat"].grad
    summed = {name: all_reduce_(g.clone(), mesh["axial"]).numpy() for name, g in gradients.items() if g is not None}
    with torch.no_grad():
        prediction = model.eval()(batch)
    return {name: value.item() for name, value in values.items()}, summed, [prediction.msa, prediction.pair, prediction.positions]


@cache
def unsharded_results(passes: int, checkpoint: bool) -> Any:
    return values_and_gradients(single_process(), passes, checkpoint)


@pytest.mark.parametrize(("axes", "passes", "checkpoint"), [
    ({"axial": 4}, 2, True), ({"replicate": 2, "axial": 2}, 1, False),
], ids=str)  # fmt: skip
def test_a_sharded_protein_gives_the_unsharded_results(axes: dict[str, int], passes: int, checkpoint: bool) -> None:
    values, gradients, outputs = unsharded_results(passes, checkpoint)
    largest = max(float(np.linalg.norm(g)) for g in gradients.values())
    for rank, (rank_values, rank_gradients, rank_outputs) in enumerate(on_ranks(axes, values_and_gradients, passes, checkpoint)):
        assert rank_values == pytest.approx(values, rel=1e-10, abs=1e-12)
        assert rank_gradients.keys() == gradients.keys() and len(rank_gradients) > 150
        for name, gradient in gradients.items():
            assert np.linalg.norm(rank_gradients[name] - gradient) <= 1e-9 * np.linalg.norm(gradient) + 1e-12 * largest, name
        for output, full, dim in zip(rank_outputs, outputs, (2, 1, None), strict=True):
            expected = full if dim is None else take_shard(full, rank % axes["axial"], axes["axial"], dim)
            local = output if dim is None else output.narrow(dim, 0, expected.shape[dim])  # without padding
            torch.testing.assert_close(local, expected, rtol=1e-10, atol=1e-10)


def train_two_steps(mesh: Mesh, shard: str) -> Any:
    """Train two steps on two replicas, with dropout, clipping and an average."""
    cfg = StepConfig(optimizer="adam", lr=1e-2, precision="fp64", clip=0.1, ema_decay=0.9, shard=shard)
    torch.manual_seed(3)
    step = Step(parallelize(network(), mesh), objective, cfg, mesh)
    replica = mesh["replicate"].rank
    values = [step({name: x[replica : replica + 1] for name, x in protein(1).items()}, 1e-2)["loss"].item() for _ in range(2)]
    return values, local_shards(step)


def test_steps_of_sharded_replicas_equal_those_of_full_ones() -> None:
    full = on_ranks({"replicate": 2}, train_two_steps, "none")
    sharded = on_ranks({"replicate": 2, "axial": 2}, train_two_steps, "weights")
    for rank, (values, _) in enumerate(sharded):
        assert values == pytest.approx(full[rank // 2][0], rel=1e-10)
    expected, actual = (gather_full([shards for _, shards in ranks]) for ranks in (full, sharded))
    check_equal(actual, expected, tolerance=1e-8)


def fold(mesh: Mesh, length: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the positions and confidence of a chain, and the peak of allocated bytes."""
    model, sequence = parallelize(network(template=None), mesh), "".join(residues.RESTYPES[i % 20] for i in range(length))
    cfg = FeatureConfig(crop=None, clusters=8, extra=8, templates=0)
    with pytest.MonkeyPatch.context() as patch, StepTracer(kernels=False) as tracer, tracer.record() as trace:
        patch.setattr(attention, "_CPU", 1 << 18)  # chunks of logits, of equal size on each rank
        prediction = model.fold(sequence, recycles=0, cfg=cfg)
    return prediction.positions, prediction.plddt, trace.peak


def test_a_chain_folded_by_several_ranks_is_the_same_with_a_share_of_the_memory() -> None:
    positions, plddt, peak = fold(single_process(), 90)
    for ranks, share in ((2, 0.62), (4, 0.42)):  # 150 residues: less than 0.6 and 0.35
        for rank_positions, rank_plddt, rank_peak in on_ranks({"axial": ranks}, fold, 90):
            np.testing.assert_allclose(rank_positions, positions, atol=1e-5)
            np.testing.assert_allclose(rank_plddt, plddt, atol=1e-4)
            assert rank_peak <= share * peak, (ranks, rank_peak / peak)


def compare_compiled(mesh: Mesh) -> list[float]:
    """Return the largest differences between outputs and gradients of a compiled layer and the eager one."""
    layer, results = parallelize(network(template=None), mesh).evoformer.blocks[0].msa_att_row, []
    m, z = (torch.randn(1, 4, 8, norm.normalized_shape[0]).double() for norm in (layer.layer_norm_m, layer.layer_norm_z))
    inputs = [m.requires_grad_(), z.requires_grad_()]
    for module in (layer, torch.compile(layer, backend="aot_eager")):
        out = module(m, torch.ones(1, 4, 8).double(), z)
        results.append([out, *torch.autograd.grad(out.square().sum(), [*inputs, *layer.parameters()])])
    return [(eager - compiled).abs().max().item() for eager, compiled in zip(*results)]


def test_a_layer_with_communication_can_be_compiled() -> None:
    for differences in on_ranks({"axial": 2}, compare_compiled):
        assert max(differences) < 1e-12 and len(differences) > 8
