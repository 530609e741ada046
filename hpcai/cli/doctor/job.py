"""The ranks of a job examine themselves and each other together; rank 0 judges and reports."""

import secrets
import signal
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
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
from hpcai.dist import Place, start, watch
from hpcai.dist.collect import agree, gather_objects, to_first
from hpcai.dist.mesh import Axis, Mesh
from hpcai.errors import DataError
from hpcai.stop import show_to_reader

_RESERVE = 5.0  # seconds of the limit that are kept to report
_SHARES = {"links": 0.35, "sums": 0.15, "folders": 0.4}  # of the time that is left once the ranks have met
_MAX_SECONDS = {"links": 15.0, "sums": 6.0, "folders": 12.0}


def check_job(words: Namespace, deadline: Deadline, here: Place, imports: float) -> int:
    """Return the exit code, the same on all ranks: 1 where something is wrong."""
    report, began = Report(), time.monotonic() - imports

    def expired(text: str) -> None:
        storage.delete_files()
        if here.rank:
            return
        report.silent, report.seconds = text, time.monotonic() - began
        print_report(words, report)

    def clean(reason: str) -> None:
        storage.delete_files()

    deadline.report = expired
    watch.say_doing(deadline.status)
    watch.last_words.append(clean)
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # files of ours are deleted on the way
    deadline.begin("meeting")
    try:
        with start({"replicate": -1}, on=torch.device("cpu")) as mesh:
            deadline.world = mesh.world
            _fill_report(words, deadline, replace(here, rank=mesh.rank, world=mesh.world), mesh, report)
            deadline.begin("reporting")
            report.seconds = time.monotonic() - began
            return agree(print_report(words, report) if mesh.is_first else 0, mesh.job)
    finally:
        signal.signal(signal.SIGTERM, before)
        watch.last_words.remove(clean)


def _fill_report(words: Namespace, deadline: Deadline, here: Place, mesh: Mesh, report: Report) -> None:
    """Fill the report of rank 0."""
    job = mesh.job
    deadline.begin("looking around")
    mine = inspect_rank(here)
    deadline.begin("waiting for all to look around")
    report.members = gather_objects(mine, job)
    left = deadline.remaining()
    token, left = agree((secrets.token_hex(6), left - min(_RESERVE, left / 3)), job)
    seconds = {part: min(share * left, _MAX_SECONDS[part]) for part, share in _SHARES.items()}
    own = _measure_network(report.members, seconds, deadline, mesh)
    report.network = network.Network(own.backend, sums=own.sums)
    for each in to_first(own, job):
        report.network.paces |= each.paces
        report.network.links += each.links
    for folders in to_first(_measure_storage(report.nodes, token, seconds["folders"], words, job, deadline), job):
        report.storage.run |= folders.run
        report.storage.scratch |= folders.scratch


def has_gpu_per_rank(members: Sequence[RankReport]) -> bool:
    """Whether each rank has a GPU for itself, so that links are measured between GPUs."""
    owners = {(member.machine, member.gpu.uuid or member.gpu.pci) for member in members if member.gpu is not None}
    return len(owners) == len(members) and torch_dist.is_nccl_available()


def _measure_network(members: Sequence[RankReport], seconds: dict[str, float], deadline: Deadline, mesh: Mesh) -> network.Network:
    """This rank's part of the network: the links that it measures, its pace."""
    rank, gpu = mesh.rank, members[mesh.rank].gpu
    where = torch.device("cuda", gpu.index) if has_gpu_per_rank(members) and gpu else torch.device("cpu")
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if mesh.world == 1:
        return network.Network(paces={0: network.measure_pace(where)})
    deadline.begin("connections")
    group = torch_dist.new_group(backend="nccl") if where.type == "cuda" else mesh.job.group
    wire, own = network.Channel(where, group, mesh.job.group), network.Network("nccl" if where.type == "cuda" else "gloo")
    wire.all_reduce(torch.zeros(1, device=where))  # NCCL wants all ranks to begin together
    deadline.begin("links of this rank")
    own.links = network.measure_links(wire, rank, [member.node for member in members], seconds["links"])
    deadline.begin("waiting for all to measure links")
    wire.all_reduce_max()
    deadline.begin("pace")
    own.paces[rank] = network.measure_pace(where)
    deadline.begin("sums")
    own.sums = network.measure_all_reduce(wire, seconds["sums"])
    return own


def _measure_storage(
    nodes: Sequence[str], token: str, seconds: float, words: Namespace, job: Axis, deadline: Deadline
) -> storage.Folders:
    """The folders as this rank sees them; the first rank of each node measures those of the run and for scratch."""
    deadline.begin("folders")
    folder: Path = words.directory
    if job.rank == 0:
        with storage.marker_file(folder, token) as problem:
            agree(problem, job)
            _barrier(job, deadline)
        seen = None if problem else True
    else:
        problem = agree("", job)
        seen = None if problem else storage.sees_marker(folder, token)
        _barrier(job, deadline)
    found, rank = storage.Folders({job.rank: storage.Folder(str(folder), seen=seen)}), job.rank
    measures, each = rank in network.first_ranks(nodes), seconds / 4  # two folders, write and read
    if measures:
        found.run[rank] = replace(storage.measure_folder(folder, token, rank, each), seen=seen)
    _barrier(job, deadline)
    if measures:
        found.scratch[rank] = storage.measure_folder(Path(tempfile.gettempdir()), token, rank, each)
    _barrier(job, deadline)
    return found


def _barrier(job: Axis, deadline: Deadline) -> None:
    deadline.begin("waiting for all at the folders")
    if job.size > 1:
        torch_dist.all_reduce(torch.zeros(1), group=job.group)
    deadline.begin("folders")


def print_report(words: Namespace, report: Report) -> int:
    """Print and write the report, and return the exit code."""
    found = diagnose(report)
    if report.members:
        show_to_reader(lambda: print(*map(printable, page.lines(report, found)), sep="\n"))
    try:
        if words.json is not None:
            content: dict[str, Any] = {"title": page.title(report), **findings.as_json(found), **asdict(report)}
            findings.write_json(words.json, content)
    except DataError as error:
        print(f"hpcai doctor: {error}", file=sys.stderr)
        return 1
    return int(findings.failed(found))
