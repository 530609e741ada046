"""What docs/benchmarks.md claims of a step of DimeNet++, measured here; and PyTorch Geometric's network is the same one."""

from importlib.util import find_spec

import pytest
import torch

from hpcai.cli.bench_opencatalyst import _balance, _build, _counts, _memory, _steps, graph_of, pyg_network, settings, slabs
from hpcai.models.dimenet import DimeNet
from hpcai.models.dimenet.triplets import edges_of, energy_and_forces
from tests.slow.trying import until

pytestmark = pytest.mark.usefixtures("one_thread")
OF = ("plain", "ours")


@pytest.mark.timing
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("angles", ["detached", "conservative"])
def test_a_step_is_at_least_twice_as_fast_as_with_triplets(angles: str) -> None:
    until(lambda row: row["plain_over_ours"] >= 2.0, lambda: _steps(angles, 1, of=OF))


@pytest.mark.timing
@pytest.mark.parametrize("angles", ["detached", "conservative"])
def test_a_step_needs_at_most_three_quarters_of_the_memory(angles: str) -> None:
    row = _memory(angles, of=OF)
    assert row["ours_over_plain"] <= 0.75, row


@pytest.mark.timing
def test_the_network_is_there_in_a_second() -> None:
    until(lambda row: row["ours_s"] < 1, lambda: _build(3, of=OF))


@pytest.mark.slow
@pytest.mark.parametrize("copies", [8, 64])
def test_copies_have_the_same_work(copies: int) -> None:
    row = _balance(_counts(None)[0], copies)
    assert row["triplets"] <= 1.05 < row["none"], row


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("torch_geometric"), reason="torch_geometric is not installed")
@pytest.mark.parametrize("angles", ["detached", "conservative"])
def test_the_network_of_pytorch_geometric_is_the_same(angles: str) -> None:
    """Whose zeros of Bessel functions have float32's precision, and which has no bias in lin_up."""
    cfg = settings(angles, tiny=True)
    torch.manual_seed(0)
    ours, theirs = DimeNet(cfg).double(), pyg_network(cfg).double()
    for output in ours.output_blocks:
        torch.nn.init.normal_(output.lin.weight, 0, 0.2)
        torch.nn.init.zeros_(output.lin_up.bias)
    theirs.load_state_dict({name: value for name, value in ours.state_dict().items() if not name.endswith("lin_up.bias")})
    graph = graph_of(slabs(tiny=True), cfg)
    edges = edges_of(graph)
    n = len(edges.numbers)
    wanted = ours(graph)
    energy, forces = energy_and_forces(theirs, graph.positions[:n], edges, angles == "detached")
    assert torch.allclose(energy, wanted.energy, rtol=0, atol=1e-5)
    assert torch.allclose(forces, wanted.forces[:n], rtol=0, atol=1e-5) and forces.abs().max() > 0.1
