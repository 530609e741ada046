"""OpenFold cut over ``axial`` is OpenFold: outputs, losses, gradients and steps are those of one process."""

import weakref
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpcai.dist.collectives import all_reduce_
from hpcai.dist.launch import single_process
from hpcai.dist.mesh import Mesh
from hpcai.kernels import attention
from hpcai.models.openfold import ObjectiveConfig, OpenFold, OpenFoldConfig, loss, parallelize, residues
from hpcai.models.openfold.features import FeatureConfig
from hpcai.settings import StepConfig
from hpcai.train.step import Step
from tests import proteins
from tests.ranks.launch import on_ranks
from tests.ranks.shards import check_equal, gather_full, local_shards

# 7 clusters with their templates, 7 extra rows, 13 residues: none divides into 2 or 4.
FEATURES = FeatureConfig(crop=13, clusters=5, extra=7, templates=2, recycles=2)
ALL = ObjectiveConfig(resolved=0.01, violation=1.0, aligned_error=0.1)


def network(**changes: Any) -> OpenFold:
    """A network whose weights say something: in a new one the last of each branch are 0."""
    torch.manual_seed(0)
    model = OpenFold(OpenFoldConfig.preset("tiny", heads={"plddt": 16, "tm": True}, **changes))
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model.double()


@cache
def protein(passes: int) -> dict[str, Tensor]:
    return proteins.random_batch([13, 11], FEATURES, passes=passes)


def objective(model: Any, batch: Any) -> dict[str, Tensor]:
    return loss(model, batch, ALL)


def part(whole: Tensor, rank: int, ranks: int, dim: int) -> Tensor:
    """What a rank has of a whole."""
    each = -(-whole.shape[dim] // ranks)
    return whole.narrow(dim, rank * each, min(each, whole.shape[dim] - rank * each))


def values_and_gradients(mesh: Mesh, passes: int, checkpoint: bool) -> tuple[dict[str, float], dict[str, np.ndarray], list[Tensor]]:
    """Values, gradients of all parameters and of the alignment, over the ranks of a copy, and some outputs; with dropout."""
    model = parallelize(network(checkpoint=checkpoint), mesh)
    batch = dict(protein(passes))
    batch["msa_feat"] = batch["msa_feat"].clone().requires_grad_()
    torch.manual_seed(7)
    values = objective(model, batch)
    values["loss"].backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients["msa_feat"] = batch["msa_feat"].grad
    found = {name: all_reduce_(g.clone(), mesh["axial"]).numpy() for name, g in gradients.items() if g is not None}
    with torch.no_grad():
        prediction = model.eval()(batch)
    return {name: value.item() for name, value in values.items()}, found, [prediction.msa, prediction.pair, prediction.positions]


@pytest.mark.parametrize("axes", [{"axial": 2}, {"axial": 4}, {"replicate": 2, "axial": 2}], ids=str)
@pytest.mark.parametrize(("passes", "checkpoint"), [(1, False), (3, True)])
def test_a_sharded_protein_gives_the_unsharded_results(axes: dict[str, int], passes: int, checkpoint: bool) -> None:
    values, gradients, outputs = values_and_gradients(single_process(), passes, checkpoint)
    largest = max(float(np.linalg.norm(g)) for g in gradients.values())
    for rank, (found, cut, given) in enumerate(on_ranks(axes, values_and_gradients, passes, checkpoint)):
        assert found == pytest.approx(values, rel=1e-10, abs=1e-12)
        assert cut.keys() == gradients.keys() and len(cut) > 150
        for name, whole in gradients.items():
            assert np.linalg.norm(cut[name] - whole) <= 1e-9 * np.linalg.norm(whole) + 1e-12 * largest, name
        for one, other, dim in zip(given, outputs, (2, 1, None), strict=True):
            expected = other if dim is None else part(other, rank % axes["axial"], axes["axial"], dim)
            here = one if dim is None else one.narrow(dim, 0, expected.shape[dim])  # the rest fills
            torch.testing.assert_close(here, expected, rtol=1e-10, atol=1e-10)


def weights_after_a_step(mesh: Mesh, shard: str) -> Any:
    """Two steps of two copies, with dropout, clipping and an average."""
    cfg = StepConfig(optimizer="adam", lr=1e-2, precision="fp64", clip=0.1, ema_decay=0.9, shard=shard)
    torch.manual_seed(3)
    step = Step(parallelize(network(), mesh), objective, cfg, mesh)
    copy = mesh["replicate"].rank
    values = [step({name: x[copy : copy + 1] for name, x in protein(1).items()}, 1e-2)["loss"].item() for _ in range(2)]
    return values, local_shards(step)


@pytest.mark.parametrize("shard", ["none", "optimizer", "weights"])
def test_steps_of_sharded_replicas_are_those_of_full_ones(shard: str) -> None:
    whole = on_ranks({"replicate": 2}, weights_after_a_step, shard)
    cut = on_ranks({"replicate": 2, "axial": 2}, weights_after_a_step, shard)
    for rank, (values, _) in enumerate(cut):
        assert values == pytest.approx(whole[rank // 2][0], rel=1e-10)
    expected, found = (gather_full([ours for _, ours in every]) for every in (whole, cut))
    check_equal(found, expected, tolerance=1e-8)


class Live(TorchDispatchMode):
    """The most bytes of tensors at a time, of those that are made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def gone(self, address: int, size: int) -> None:
        self.known.discard(address)
        self.now -= size

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage.data_ptr() not in given | self.known:
                self.known.add(storage.data_ptr())
                self.now += storage.nbytes()
                weakref.finalize(storage, self.gone, storage.data_ptr(), storage.nbytes())
        self.most = max(self.most, self.now)
        return made


def folded(mesh: Mesh, length: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Positions and confidence of a chain, and the most bytes at a time."""
    model, sequence = parallelize(network(template=None), mesh), "".join(residues.RESTYPES[i % 20] for i in range(length))
    rows = FeatureConfig(crop=None, clusters=8, extra=8, templates=0)
    with pytest.MonkeyPatch.context() as patch, Live() as live:
        patch.setattr(attention, "_CPU", 1 << 18)  # logits of some rows, which are as many on each rank
        found = model.fold(sequence, recycles=0, cfg=rows)
    return found.positions, found.plddt, live.most


def test_a_chain_folded_by_several_ranks_is_the_same_with_a_share_of_the_memory() -> None:
    positions, plddt, most = folded(single_process(), 90)
    for ranks, share in ((2, 0.62), (4, 0.42)):  # 150 residues: less than 0.6 and 0.35
        for found, sure, bytes_ in on_ranks({"axial": ranks}, folded, 90):
            np.testing.assert_allclose(found, positions, atol=1e-5)
            np.testing.assert_allclose(sure, plddt, atol=1e-4)
            assert bytes_ <= share * most, (ranks, bytes_ / most)


def compiled(mesh: Mesh) -> list[float]:
    """By how much outputs and gradients of a part differ once it is compiled."""
    part, found = parallelize(network(template=None), mesh).evoformer.blocks[0].msa_att_row, []
    m, z = (torch.randn(1, 4, 8, each.normalized_shape[0]).double() for each in (part.layer_norm_m, part.layer_norm_z))
    given = [m.requires_grad_(), z.requires_grad_()]
    for form in (part, torch.compile(part, backend="aot_eager")):
        out = form(m, torch.ones(1, 4, 8).double(), z)
        found.append([out, *torch.autograd.grad(out.square().sum(), [*given, *part.parameters()])])
    return [(one - other).abs().max().item() for one, other in zip(*found)]


def test_halves_of_a_seam_can_be_compiled_around() -> None:
    for apart in on_ranks({"axial": 2}, compiled):
        assert max(apart) < 1e-12 and len(apart) > 8
