"""Named axes: always there, and refused with a reason when they do not fit."""

import pytest
import torch

from hpcai.dist.mesh import AXES, Mesh
from hpcai.errors import MeshError
from tests.ranks.launch import on_ranks


def test_alone_every_axis_has_size_1() -> None:
    mesh = Mesh({"replicate": -1})
    assert {name: mesh[name].size for name in AXES if name != "evaluate"} == dict.fromkeys(AXES[:-1], 1)
    assert mesh.is_first and mesh["depth"].group is None and mesh.device == torch.device("cpu")


@pytest.mark.parametrize(
    "sizes, world, text",
    [
        ({"replicate": -1, "depth": 3}, 8, "mesh depth 3 needs a multiple of 3 processes, but 8 were started"),
        ({"replicate": 2, "depth": 2}, 1, "mesh replicate 2 x depth 2 needs 4 processes, but 1 was started"),
        ({"replicate": 1}, 4, "mesh of size 1 needs 1 process, but 4 were started"),
        ({"copies": 2}, 2, "mesh has no axis 'copies'; it has replicate, axial"),
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
