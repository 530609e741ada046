"""Named axes: always there, and refused with a reason when they do not fit."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as torch_dist

from hpcai.dist import alone, collect
from hpcai.dist.mesh import AXES, Axis, Mesh
from hpcai.errors import MeshError
from tests.ranks.launch import on_ranks


def test_alone_every_axis_has_size_1() -> None:
    for mesh in (Mesh({"replicate": -1}), alone(torch.device("cpu"))):
        assert {name: mesh[name].size for name in AXES if name != "evaluate"} == dict.fromkeys(AXES[:-1], 1)
        assert (mesh.world, mesh.rank, mesh.is_first, mesh["depth"].group, mesh.device) == (1, 0, True, None, torch.device("cpu"))
    assert not torch_dist.is_initialized()


@pytest.mark.parametrize(
    "sizes, world, text",
    [
        ({"replicate": -1, "depth": 3}, 8, "mesh depth 3 needs a multiple of 3 processes, but 8 were started"),
        ({"replicate": 2, "depth": 2}, 1, "mesh replicate 2 x depth 2 needs 4 processes, but 1 was started"),
        ({"replicate": 1}, 4, "mesh of size 1 needs 1 process, but 4 were started"),
        ({"copies": 2}, 2, "mesh has no axis 'copies'; it has replicate, pipeline"),
        ({"replicate": -1, "depth": -1}, 4, "only one axis can take the rest"),
    ],
)
def test_axes_that_do_not_fit(sizes: dict[str, int], world: int, text: str) -> None:
    with pytest.raises(MeshError, match=text.replace("(", r"\(")):
        Mesh(sizes, world)


def test_an_unknown_axis_and_an_axis_that_a_model_cannot_use() -> None:
    mesh = Mesh({})
    with pytest.raises(MeshError, match="no axis 'dpth'; it has replicate"):
        mesh["dpth"]
    mesh.sizes["tensor"] = 2
    with pytest.raises(MeshError, match=r"mesh.tensor is 2, but CosmoFlow can be spread over replicate only; set mesh.tensor=1"):
        mesh.only("CosmoFlow", "replicate")


def place(mesh: Mesh) -> tuple[int, ...]:
    return mesh.rank, mesh["replicate"].rank, mesh["depth"].rank, mesh["replicate"].size, mesh["depth"].size, mesh["tensor"].size


def test_the_last_axis_varies_fastest() -> None:
    assert on_ranks({"replicate": 2, "depth": 2}, place) == [
        (0, 0, 0, 2, 2, 1),
        (1, 0, 1, 2, 2, 1),
        (2, 1, 0, 2, 2, 1),
        (3, 1, 1, 2, 2, 1),
    ]


def test_the_backend_of_a_group_of_several_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert collect.backend(cuda, Axis("alone")) == "none"
    axis = Axis("replicate", 2, 0, SimpleNamespace(group=object()))  # type: ignore[arg-type]
    for names, expected in (("cpu:gloo,cuda:nccl", ("gloo", "nccl")), ("gloo", ("gloo", "gloo")), ("nccl", ("nccl", "nccl"))):
        monkeypatch.setattr(collect.torch_dist, "get_backend", lambda group, n=names: n)
        assert (collect.backend(cpu, axis), collect.backend(cuda, axis)) == expected


def ranks_of(mesh: Mesh) -> tuple[bool, bool, int, int, tuple[int, ...], list[int]]:
    link = torch_dist.get_process_group_ranks(mesh.link.group) if mesh.link.group else []
    axes = (mesh["replicate"].rank, mesh["replicate"].size, mesh["depth"].rank, mesh["depth"].size, mesh.everyone.size)
    return mesh.trains, mesh.is_first, mesh.rank, mesh.world, axes, link


def test_the_last_ranks_only_evaluate_with_axes_of_their_own() -> None:
    assert on_ranks({"replicate": 2, "depth": 2, "evaluate": 2}, ranks_of) == [
        (True, True, 0, 4, (0, 2, 0, 2, 4), [0, 4]),
        (True, False, 1, 4, (0, 2, 1, 2, 4), [1, 5]),
        (True, False, 2, 4, (1, 2, 0, 2, 4), []),
        (True, False, 3, 4, (1, 2, 1, 2, 4), []),
        (False, False, 0, 2, (0, 1, 0, 2, 2), [0, 4]),
        (False, False, 1, 2, (0, 1, 1, 2, 2), [1, 5]),
    ]


def halves(mesh: Mesh) -> list[list[int]]:
    axes = mesh.split("replicate", 2, "step.shard_within")
    return [torch_dist.get_process_group_ranks(axis.group) if axis.group else [axis.size] for axis in axes]


def test_an_axis_splits_into_neighbours_and_those_with_the_same_place() -> None:
    found = on_ranks({"replicate": 4, "depth": 1}, halves)
    assert found == [[[0, 2], [0, 1]], [[1, 3], [0, 1]], [[0, 2], [2, 3]], [[1, 3], [2, 3]]]
    assert on_ranks({"replicate": 2, "depth": 2}, halves)[0] == [[1], [0, 2]], "one group: nothing is between"
