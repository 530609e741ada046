"""Mesh axes: every mesh has all of them, and sizes that do not fit are refused with a reason."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as torch_dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpcai import settings
from hpcai.dist import collectives, single_process
from hpcai.dist.mesh import AXES, Axis, Mesh
from hpcai.errors import MeshError
from hpcai.settings import MeshConfig
from tests.ranks.launch import on_ranks
from tests.reference_data import load_json


def test_every_axis_of_a_single_process_has_size_1() -> None:
    for mesh in (Mesh({"replicate": -1}), single_process(torch.device("cpu"))):
        assert {name: mesh[name].size for name in AXES if name != "evaluate"} == dict.fromkeys(AXES[:-1], 1)
        assert (mesh.world, mesh.rank, mesh.is_first, mesh["depth"].group, mesh.device) == (1, 0, True, None, torch.device("cpu"))
    assert not torch_dist.is_initialized()


@pytest.mark.parametrize(("sizes", "world", "text"), load_json("refused/meshes"), ids=str)
def test_axes_that_do_not_match_the_processes(sizes: dict[str, int], world: int, text: str) -> None:
    with pytest.raises(MeshError, match=text.replace("(", r"\(")):
        Mesh(sizes, world)


def test_an_unknown_axis_and_an_unsupported_axis_of_a_model() -> None:
    mesh = Mesh({})
    with pytest.raises(MeshError, match="no axis 'dpth'; it has replicate"):
        mesh["dpth"]
    mesh.sizes["tensor"] = 2
    with pytest.raises(MeshError, match=r"mesh.tensor is 2, but CosmoFlow can be sharded over replicate only; set mesh.tensor=1"):
        mesh.check_axes("CosmoFlow", "replicate")


def test_the_backend_of_a_group_with_several_depends_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert collectives.get_backend(cuda, Axis("alone")) == "none"
    axis = Axis("replicate", 2, 0, SimpleNamespace(group=object()))  # type: ignore[arg-type]
    for names, expected in (("cpu:gloo,cuda:nccl", ("gloo", "nccl")), ("gloo", ("gloo", "gloo")), ("nccl", ("nccl", "nccl"))):
        monkeypatch.setattr(collectives.torch_dist, "get_backend", lambda group, n=names: n)
        assert (collectives.get_backend(cpu, axis), collectives.get_backend(cuda, axis)) == expected


def get_layout(mesh: Mesh) -> tuple[bool, bool, int, int, tuple[int, ...], list[int]]:
    link = torch_dist.get_process_group_ranks(mesh.link.group) if mesh.link.group else []
    axes = (mesh["replicate"].rank, mesh["replicate"].size, mesh["depth"].rank, mesh["depth"].size, mesh.peers.size)
    return mesh.trains, mesh.is_first, mesh.rank, mesh.world, axes, link


def test_the_last_axis_varies_fastest_and_the_last_ranks_only_evaluate_with_axes_of_their_own() -> None:
    assert on_ranks({"replicate": 2, "depth": 2, "evaluate": 2}, get_layout) == [
        (True, True, 0, 4, (0, 2, 0, 2, 4), [0, 4]), (True, False, 1, 4, (0, 2, 1, 2, 4), [1, 5]),
        (True, False, 2, 4, (1, 2, 0, 2, 4), []), (True, False, 3, 4, (1, 2, 1, 2, 4), []),
        (False, False, 0, 2, (0, 1, 0, 2, 2), [0, 4]), (False, False, 1, 2, (0, 1, 1, 2, 2), [1, 5]),
    ]  # fmt: skip


@pytest.fixture
def init_fake_group() -> Iterator[Callable[[int, int], None]]:
    yield lambda world, rank: torch_dist.init_process_group("fake", store=FakeStore(), world_size=world, rank=rank)
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()


def test_each_of_2048_ranks_creates_only_its_own_groups_on_first_use(init_fake_group: Callable[[int, int], None]) -> None:
    init_fake_group(2048, 1237)
    mesh = Mesh({"replicate": -1} | dict.fromkeys(AXES[1:-1], 2), 2048, 1237)
    groups = torch_dist.distributed_c10d._world.pg_map
    assert len(groups) == 1 and [axis.size for axis in mesh.used] == [32, 2, 2, 2, 2, 2, 2]
    ranks = torch.arange(2048).reshape(32, 2, 2, 2, 2, 2, 2)
    for dim, axis in enumerate(mesh.used):
        position = [int(i) for i in (ranks == 1237).nonzero()[0]]
        line = ranks[(*position[:dim], slice(None), *position[dim + 1 :])].tolist()
        assert torch_dist.get_process_group_ranks(axis.group) == line and axis.rank == position[dim] == line.index(1237)
        assert len(groups) == dim + 2
    assert torch_dist.get_process_group_ranks(mesh.model_parallel.group) == [*range(1216, 1280)] and len(groups) == 9
    assert mesh.peers.group is mesh.job.group is torch_dist.group.WORLD and len(groups) == 9
    assert [line.ranks for line in mesh.created[-2:]] == [tuple(range(1216, 1280)), tuple(range(2048))]
    flattened = mesh.flatten("tensor", "depth")
    assert flattened.dimension is not None and flattened.dimension.ranks == (1232, 1233, 1236, 1237)
    assert (flattened.name, flattened.rank) == ("depth x tensor", 3)
    assert flattened is mesh.flatten("depth", "tensor") and len(groups) == 9


def test_a_dimension_first_used_within_another_process_group_is_an_error(init_fake_group: Callable[[int, int], None]) -> None:
    init_fake_group(4, 0)
    old = Mesh({"replicate": 2, "depth": 2}, 4, 0)
    first = old["depth"].group
    torch_dist.destroy_process_group()
    with pytest.raises(MeshError, match=r"ranks 0, 2 first communicate within no process group; use it within its own start\(\)"):
        old["replicate"].init_group()
    init_fake_group(4, 0)
    with pytest.raises(MeshError, match="ranks 0, 2 first communicate within another process group than that of their mesh"):
        old["replicate"].init_group()
    assert Mesh({"replicate": 2, "depth": 2}, 4, 0)["depth"].group is not first


def test_axes_without_a_device_mesh(init_fake_group: Callable[[int, int], None]) -> None:
    init_fake_group(4, 0)
    mesh = Mesh({"replicate": 2, "depth": 2}, 4, 0)
    both = mesh.peers, mesh.model_parallel
    for axes, text in ((mesh["tensor"],), "tensor, which has size 1"), ((), "no axis"), (both, "peers and model_parallel"):
        with pytest.raises(MeshError, match=f"a DeviceMesh over {text}"):
            mesh.device_mesh(*axes)
    with pytest.raises(MeshError, match="no axis 'dpth'"):
        mesh.flatten("depth", "dpth")


def test_an_axis_of_several_apps_has_settings_of_its_name() -> None:
    assert {**MeshConfig().model_dump(), "replicate": 1} == {"replicate": 1, "evaluate": 0}
    for kind in (settings.Depth, settings.Height, settings.Tensor):
        name = kind.__name__.lower()
        assert name in AXES and kind().model_dump() == {name: 1}
        assert kind.model_validate({name: 2}).model_dump() == {name: 2}


def test_a_gpu_without_an_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread would use the first GPU of the node."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert Mesh({}, device=torch.device("cuda")).device == torch.device("cuda", 3)
    assert Mesh({}, device=torch.device("cuda", 1)).device == torch.device("cuda", 1)
    assert Mesh({}).device == torch.device("cpu")
