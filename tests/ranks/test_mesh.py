"""Groups of the mesh: created by their members on first use, and shared by axes of the same ranks."""

import copy
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import nn

from hpcai.dist.collectives import all_gather_object, all_reduce_
from hpcai.dist.mesh import Axis, Mesh
from hpcai.parallel.batchnorm import convert_sync_batchnorm
from tests.ranks.launch import on_ranks


def count_groups() -> int:
    return len(torch_dist.distributed_c10d._world.pg_map) - 1  # besides that of the job


def members(axis: Axis) -> list[int]:
    ranks = all_gather_object(torch_dist.get_rank(), axis)
    assert axis.group is None or torch_dist.get_process_group_ranks(axis.group) == ranks
    assert ranks[axis.rank] == torch_dist.get_rank() and len(ranks) == axis.size
    assert all_reduce_(torch.tensor(torch_dist.get_rank()), axis).item() == sum(ranks)
    return ranks


def use_axes(mesh: Mesh) -> list[list[int]]:
    depth, before = mesh["depth"], hash(mesh["depth"])
    assert mesh.used == (mesh["replicate"], depth) and copy.deepcopy(depth) is depth and {depth: 1}[depth] and count_groups() == 0
    ranks = [members(depth)]
    assert count_groups() == 1 and mesh.model_parallel.group is depth.group and hash(depth) == before and count_groups() == 1
    norms = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2)), mesh, 2)
    assert count_groups() == 2, "a layer has its group before its first pass, which may be compiled"
    ranks += [members(mesh["replicate"]), members(mesh.peers), members(mesh["tensor"])]
    assert count_groups() == 2 and mesh.peers.group is torch_dist.group.WORLD
    flattened = mesh.flatten("depth", "replicate")
    assert flattened is mesh.flatten("replicate", "depth") and (flattened.name, flattened.rank) == ("replicate x depth", mesh.rank)
    assert flattened.group is mesh.peers.group and mesh.flatten("depth") is depth
    assert mesh.flatten("height", "depth").group is depth.group
    background = mesh.background_axis("model_parallel")
    assert count_groups() == 3 and background is mesh.background_axis("model_parallel")
    assert background.group is not depth.group and members(background) == ranks[0]
    others = mesh.new_background_axis("model_parallel"), mesh.new_background_axis("model_parallel")
    assert count_groups() == 5 and len({axis.group for axis in (background, *others)}) == 3 and members(others[1]) == ranks[0]
    twin = mesh.background_copy(norms)
    assert count_groups() == 6 and twin[0].all_reduce.axes == (mesh.background_axis("replicate"),), "its copy has a background axis"
    second = Mesh(mesh.sizes, 4, mesh.rank)
    assert members(second["depth"]) == ranks[0] and second["depth"].group is depth.group and count_groups() == 6
    return ranks


def test_groups_are_created_on_first_use_and_shared_by_axes_of_the_same_ranks() -> None:
    results = on_ranks({"replicate": 2, "depth": 2}, use_axes, fresh=True)
    assert results == [[[d, d + 1], [r, r + 2], [0, 1, 2, 3], [rank]] for rank in range(4) for d, r in [(rank // 2 * 2, rank % 2)]]


def split_axes(mesh: Mesh) -> list[list[int]]:
    between, within = mesh.split("replicate", 2, "step.shard_within")
    assert count_groups() == 0 and (between.parent, within.parent, mesh["replicate"].parent) == ("replicate", "replicate", "")
    devices = mesh.device_mesh(between, within)
    assert devices.mesh.tolist() == [[0, 1], [2, 3]] and devices is mesh.device_mesh(*mesh.split("replicate", 2, ""))
    assert [devices.get_group(i) for i in (0, 1)] == [between.group, within.group] and count_groups() == 2
    flat = mesh.device_mesh(mesh["replicate"])
    assert flat.get_group() is torch_dist.group.WORLD and flat.mesh.tolist() == [0, 1, 2, 3]
    other = Mesh({"replicate": 2, "depth": 2}, 4, mesh.rank)
    assert [axis.size for axis in other.split("replicate", 2, "")] == [1, 2] and count_groups() == 2, "the outer axis has one rank"
    transposed = other.device_mesh(other["depth"], other["replicate"])
    assert transposed.mesh.tolist() == [[0, 2], [1, 3]] and count_groups() == 2, "the groups of these pairs existed already"
    return [members(between), members(within)]


def test_split_axes_and_device_meshes_share_these_groups() -> None:
    results = on_ranks({"replicate": 4}, split_axes, fresh=True)
    assert results == [[[0, 2], [0, 1]], [[1, 3], [0, 1]], [[0, 2], [2, 3]], [[1, 3], [2, 3]]]


def members_of_axes(mesh: Mesh) -> tuple[int, list[list[int]]]:
    before = count_groups()
    torch_dist.new_group([1, 2])  # a user's group, without some ranks of a dimension
    between, _ = mesh.split("replicate", 2, "step.shard_within")
    axes = mesh.link, mesh.peers, mesh["depth"], mesh.model_parallel, mesh["replicate"], between
    return before, [members(axis) for axis in axes]


def test_members_of_a_dimension_may_be_in_different_numbers_of_groups() -> None:
    results = on_ranks({"replicate": 4, "depth": 2, "evaluate": 2}, members_of_axes, fresh=True, timeout=30)
    assert [before for before, _ in results] == [1, 1, 0, 0, 0, 0, 0, 0, 1, 1], "the link has its group at once"
    train = [*range(8)]
    assert results[0][1] == [[0, 8], train, [0, 1], [0, 1], [0, 2, 4, 6], [0, 4]]
    assert results[3][1] == [[3], train, [2, 3], [2, 3], [1, 3, 5, 7], [3, 7]]
    assert results[9][1] == [[1, 9], [8, 9], [8, 9], [8, 9], [9], [9]]


def group_timeouts(mesh: Mesh) -> list[float]:
    mesh = Mesh(mesh.sizes, mesh.job.size, mesh.job.rank, timeout=timedelta(seconds=77))
    cpu = torch.device("cpu")
    groups: list[Any] = [axis.group for axis in (mesh["depth"], mesh.background_axis("depth"), mesh.link)]
    return [group._get_backend(cpu).options._timeout.total_seconds() for group in groups]


def test_timeouts_of_groups() -> None:
    assert on_ranks({"depth": 2, "evaluate": 2}, group_timeouts, fresh=True) == [[77, 1800, 7 * 86400]] * 4
