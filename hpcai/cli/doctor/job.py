"""The collective part of `hpcai doctor --ranks`: all ranks measure themselves and the network; rank 0 diagnoses and reports."""

import secrets
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist

from hpcai.cli import findings
from hpcai.cli.doctor import network, page, storage
from hpcai.cli.doctor.deadline import Deadline
from hpcai.cli.doctor.findings import Report, diagnose
from hpcai.cli.doctor.rank_report import RankReport, inspect_rank
from hpcai.cli.findings import printable
from hpcai.dist import RankInfo, start, watchdog
from hpcai.dist.collectives import all_gather_object, broadcast_object, gather_to_first
from hpcai.dist.mesh import Axis, Mesh
from hpcai.errors import DataError
from hpcai.stop import ignore_broken_pipe

_RESERVE = 5.0  # seconds of the limit reserved for the report
_SHARES = {"links": 0.35, "sums": 0.15, "folders": 0.4}  # of the remaining time after the rendezvous
_MAX_SECONDS = {"links": 15.0, "sums": 6.0, "folders": 12.0}


def check_job(args: Namespace, deadline: Deadline, rank_info: RankInfo, imports: float) -> int:
    """Return the exit code, the same on all ranks: 1 if there are errors."""
    report, started = Report(), time.monotonic() - imports

    def expired(text: str) -> None:
        storage.delete_files()
        if rank_info.rank == 0:
            report.silent, report.seconds = text, time.monotonic() - started
            print_report(args, report)

    deadline.report = expired
    watchdog.set_status(deadline.status)
    watchdog.on_abort.append(storage.delete_files)
    deadline.begin("meeting")
    try:
        with start({"replicate": -1}, device=torch.device("cpu")) as mesh:
            deadline.world = mesh.world
            _fill_report(args, deadline, replace(rank_info, rank=mesh.rank, world=mesh.world), mesh, report)
            deadline.begin("reporting")
            report.seconds = time.monotonic() - started
            return broadcast_object(print_report(args, report) if mesh.is_first else 0, mesh.job)
    finally:
        watchdog.on_abort.remove(storage.delete_files)


def _fill_report(args: Namespace, deadline: Deadline, rank_info: RankInfo, mesh: Mesh, report: Report) -> None:
    job = mesh.job
    deadline.begin("inspection")
    own_report = inspect_rank(rank_info)
    deadline.begin("waiting for all inspections")
    report.members = all_gather_object(own_report, job)
    remaining = deadline.remaining()
    token, remaining = broadcast_object((secrets.token_hex(6), remaining - min(_RESERVE, remaining / 3)), job)
    seconds = {part: min(share * remaining, _MAX_SECONDS[part]) for part, share in _SHARES.items()}
    own_network = _measure_network(report.members, seconds, deadline, mesh)
    report.network = network.Network(own_network.backend, sums=own_network.sums, all_to_all=own_network.all_to_all)
    for network_part in gather_to_first(own_network, job):
        report.network.paces |= network_part.paces
        report.network.links += network_part.links
    for folders in gather_to_first(_measure_storage(report.nodes, token, seconds["folders"], args, job, deadline), job):
        report.storage.run |= folders.run
        report.storage.scratch |= folders.scratch


def has_gpu_per_rank(members: Sequence[RankReport]) -> bool:
    """Whether each rank has its own GPU, so that links are measured between GPUs."""
    owners = {(member.machine, member.gpu.uuid or member.gpu.pci) for member in members if member.gpu is not None}
    return len(owners) == len(members) and torch_dist.is_nccl_available()


def _measure_network(members: Sequence[RankReport], seconds: dict[str, float], deadline: Deadline, mesh: Mesh) -> network.Network:
    """Return this rank's part of the network: the links that it measures, and its compute rate."""
    rank, gpu = mesh.rank, members[mesh.rank].gpu
    device = torch.device("cuda", gpu.index) if has_gpu_per_rank(members) and gpu else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if mesh.world == 1:
        return network.Network(paces={0: network.measure_pace(device)})
    deadline.begin("connections")
    group = torch_dist.new_group(backend="nccl") if device.type == "cuda" else mesh.job.group
    channel, result = network.Channel(device, group, mesh.job), network.Network("nccl" if device.type == "cuda" else "gloo")
    channel.all_reduce(torch.zeros(1, device=device))  # NCCL initializes on all ranks together
    deadline.begin("links of this rank")
    result.links = network.measure_links(channel, rank, [member.node for member in members], seconds["links"])
    deadline.begin("waiting for all to measure links")
    all_gather_object(None, mesh.job)
    deadline.begin("pace")
    result.paces[rank] = network.measure_pace(device)
    deadline.begin("sums")
    result.sums = network.measure_collective(channel, channel.all_reduce, seconds["sums"] / 2)
    deadline.begin("all-to-all")
    result.all_to_all = network.measure_collective(channel, channel.all_to_all, seconds["sums"] / 2)
    return result


def _measure_storage(
    nodes: Sequence[str], token: str, seconds: float, args: Namespace, job: Axis, deadline: Deadline
) -> storage.Folders:
    """Return this rank's view of the folders; the first rank of each node measures the run's and the scratch folder."""
    deadline.begin("folders")
    folder: Path = args.directory
    with storage.marker_file(folder, token) if job.rank == 0 else nullcontext("") as own_problem:
        problem = broadcast_object(own_problem, job)
        seen = None if problem else job.rank == 0 or storage.sees_marker(folder, token)
        _barrier(job, deadline)
    folders, rank = storage.Folders({job.rank: storage.Folder(str(folder), seen=seen)}), job.rank
    is_first, seconds_each = rank in network.first_ranks(nodes), seconds / 4  # two folders, each written and read
    if is_first:
        folders.run[rank] = replace(storage.measure_folder(folder, token, rank, seconds_each), seen=seen)
    _barrier(job, deadline)
    if is_first:
        folders.scratch[rank] = storage.measure_folder(Path(tempfile.gettempdir()), token, rank, seconds_each)
    _barrier(job, deadline)
    return folders


def _barrier(job: Axis, deadline: Deadline) -> None:
    deadline.begin("waiting for all at the folders")
    all_gather_object(None, job)
    deadline.begin("folders")


def print_report(args: Namespace, report: Report) -> int:
    results = diagnose(report)
    if report.members:
        ignore_broken_pipe(lambda: print(*map(printable, page.lines(report, results)), sep="\n"))
    try:
        if args.json is not None:
            content: dict[str, Any] = {"title": page.title(report), **findings.as_json(results), **asdict(report)}
            findings.write_json(args.json, content)
    except DataError as error:
        print(f"hpcai doctor: {error}", file=sys.stderr)
        return 1
    return int(findings.failed(results))
