"""`hpcai doctor --ranks` on GPUs: links and all-reduce over NCCL, and pace of each rank."""

import json
from pathlib import Path

import torch.distributed as torch_dist

from hpcai import cli
from hpcai.cli.doctor import network
from hpcai.dist.collectives import all_gather_object
from hpcai.dist.mesh import Mesh
from tests.gpu.device import DEVICE, ON_GPU
from tests.gpu.launch import needs_gpus, on_gpus


def measure(mesh: Mesh) -> tuple[list[network.Link], dict[int, float], float]:
    group = torch_dist.new_group(backend="nccl" if ON_GPU else "gloo")
    channel = network.Channel(mesh.device, group, mesh.job)
    all_gather_object(None, mesh.job)
    links = network.measure_links(channel, mesh.rank, ["n"] * mesh.world, 20.0)
    return links, network.measure_collective(channel, channel.all_reduce, 5.0), network.measure_pace(mesh.device, 0.2).rate


@needs_gpus(2)
def test_pairs_of_gpus_are_measured() -> None:
    results = on_gpus({"replicate": 2}, measure)
    ((link,), sums, _), _ = results
    assert (link.one, link.other) == (0, 1) and 0 < link.latency < 0.1 and link.rate > 1e6
    assert {8, 1 << 20} <= set(sums) and all(seconds > 0 for seconds in sums.values())
    assert all(rate > (1e13 if ON_GPU else 1e8) for *_, rate in results)


def test_a_gpu_is_told(tmp_path: Path) -> None:
    args = ["--directory", str(tmp_path), "--json", str(tmp_path / "o.json"), "--limit", "40"]
    assert cli.main(["doctor", "--ranks", *args]) == 0
    report = json.loads((tmp_path / "o.json").read_text())
    assert (report["members"][0]["gpu"] is not None) == (DEVICE.type == "cuda")
    assert report["network"]["paces"]["0"]["rate"] > (1e13 if ON_GPU else 1e8)
