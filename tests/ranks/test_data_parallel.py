"""Data parallelism has the values and gradients of one process with the full batch."""

import pytest
import torch
from torch import nn

from hpcai.dist.mesh import Mesh
from hpcai.errors import DivergedError
from hpcai.parallel.data_parallel import Bucket, GradientReducer, sum_gradients_over
from hpcai.settings import StepConfig
from hpcai.train.step import Step
from tests.ranks.launch import on_ranks

MESHES = [{"replicate": 1}, {"replicate": 2}, {"replicate": 4}, {"replicate": 2, "depth": 2}, {"replicate": 2, "axial": 2}]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 3, 6, 6, generator=generator).double(), torch.randn(8, 2, generator=generator).double()


def loss(model: nn.Module, part: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"loss": (model(part[0]) - part[1]).square().mean()}


def reference() -> tuple[nn.Module, list[torch.Tensor]]:
    model = network()
    loss(model, batch())["loss"].backward()
    return model, [p.grad for p in model.parameters()]


def compare(mesh: Mesh, bucket_mb: float, accumulate: int) -> None:
    expected_model, expected = reference()
    model = network()
    if mesh["replicate"].rank or mesh["depth"].rank:  # replicas start equal, whatever their initialization
        with torch.no_grad():
            for p in model.parameters():
                p.normal_()
    model.register_buffer("mean", torch.full((2,), float(mesh.rank)))
    keys = list(model.state_dict())
    if mesh["depth"].size > 1:  # as if each rank of the axis saw half of every sample
        sum_gradients_over(model, mesh["depth"])
    axis = mesh["replicate"]
    part = tuple(x.chunk(axis.size)[axis.rank] for x in batch())
    step = Step(
        model, loss, StepConfig(precision="fp64", bucket_mb=bucket_mb, accumulate=accumulate, optimizer="sgd", lr=0.1), mesh
    )
    assert not model.mean.any(), "buffers start equal, too"
    forward_backward = step.forward_backward
    share = 1.0 / mesh["depth"].size
    step._weight *= share
    for _ in range(2):  # the first step leaves no state
        for p, before in zip(model.parameters(), expected_model.parameters()):
            torch.testing.assert_close(p, before, rtol=0, atol=0)
        step.reducer.zero_grad()
        forward_backward(model, part)
        step.reducer.reduce()
        for p, gradient in zip(model.parameters(), expected):
            torch.testing.assert_close(p.grad, gradient, rtol=1e-12, atol=1e-14)
            assert p.grad.stride() == p.stride()
    assert list(model.state_dict()) == keys
    if mesh["replicate"].size > 1:
        flats = [bucket.gradients for bucket in step.reducer.buckets]
        inside = [any(f.data_ptr() <= p.grad.data_ptr() < f.data_ptr() + f.nbytes for f in flats) for p in model.parameters()]
        assert all(inside), "gradients are views of their buckets"


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("bucket_mb, accumulate", [(25.0, 1), (1e-4, 1), (1e-3, 2)])
def test_replicas_equal_one_process(axes: dict[str, int], bucket_mb: float, accumulate: int) -> None:
    on_ranks(axes, compare, bucket_mb, accumulate)


class Sometimes(nn.Module):
    """A network that uses its second layer on the first rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(2, 2), nn.Linear(2, 2)


def unused_gradient(mesh: Mesh) -> float:
    torch.manual_seed(0)
    model = Sometimes()
    reducer, gradients = GradientReducer(model, mesh, bucket_mb=1e-5), []
    for step in range(3):  # gradients of an earlier step must not remain
        reducer.zero_grad()
        out = model.always(torch.ones(1, 2))
        if mesh.rank == 0 or step == 1:
            out = model.sometimes(out)
        out.sum().backward()
        reducer.reduce()
        gradients.append(model.sometimes.weight.grad.sum().item())
    assert gradients[0] == gradients[2] == gradients[1] / 2
    return gradients[2]


def test_the_gradient_of_a_parameter_that_one_rank_does_not_use_is_zero_and_no_rank_hangs() -> None:
    first, second = on_ranks({"replicate": 2}, unused_gradient)
    assert first == second != 0.0


def nonfinite_step(mesh: Mesh) -> tuple[str, bool]:
    """Return the report of a NaN in the second step of rank 1, and whether the weights stayed those of the first step."""
    torch.manual_seed(0)
    step = Step(nn.Linear(3, 1), lambda model, x: {"loss": model(x).square().mean()}, StepConfig(optimizer="sgd", lr=0.1), mesh)
    step(torch.ones(2, 3))
    before = step.model.weight.detach().clone()
    step(torch.full((2, 3), torch.nan if mesh.rank == 1 else 1.0))
    step(torch.ones(2, 3))
    with pytest.raises(DivergedError) as error:
        step.check(lambda number: f"sample {mesh.rank} of step {number}")
    return str(error.value), torch.equal(step.model.weight, before)


def test_a_loss_that_is_not_finite_on_one_rank_is_reported_on_all_and_changes_no_weights() -> None:
    for message, unchanged in on_ranks({"replicate": 2}, nonfinite_step):
        assert message.startswith("step 2: the loss is not finite on rank 1 (sample 1 of step 1)") and unchanged, message


def reduce_bucket(mesh: Mesh) -> float:
    bucket = Bucket({"w": nn.Parameter(torch.zeros(3))}, (mesh["replicate"], mesh["depth"]), False, torch.float32)
    bucket.gradients.fill_(10.0**mesh.rank)
    bucket.launch()
    bucket.wait()
    return float(bucket.gradients[0])


def test_a_bucket_is_reduced_over_each_of_its_axes() -> None:
    """One collective covers all axes if there is a group for them; with three axes there may be none."""
    assert on_ranks({"replicate": 2, "depth": 2}, reduce_bucket) == [1111.0] * 4
