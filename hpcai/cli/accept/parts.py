"""Parts that workloads share, measured alone: ranks, network and disks, checkpoints, a killed rank and the resumed job."""

import json
from pathlib import Path
from statistics import median
from typing import Any

from hpcai.log import METRICS, read_metrics

_MIN_RATE, _MIN_SHARE = 0.65, 0.8  # of the fastest rank; of the time of its cores
_MAX_END = 60.0  # seconds


def describe_errors(report: Path) -> str:
    """Return the errors in a report of `hpcai doctor --ranks`, or "" if there are none."""
    errors = [finding for finding in _read_json(report)["findings"] if finding["severity"] == "error"]
    return "; ".join(f"{error['place']}: {error['text']}" for error in errors)


def find_slow_rank(report: Path) -> str:
    """Return the rank that computes slowest and its node, if its rate is below ``_MIN_RATE`` of the fastest, or ""."""
    content, rates = _read_json(report), _rates_by_rank(report)
    slow, fast = min(rates, key=rates.__getitem__), max(rates, key=rates.__getitem__)
    if rates[slow] >= _MIN_RATE * rates[fast]:
        return ""
    nodes = [member["node"] for member in content["members"]]
    share = content["network"]["paces"][str(slow)]["share"]
    return (
        f"rank {slow} on node {nodes[slow]} computes {rates[slow] / 1e9:,.1f} GFLOP/s, {100 * rates[slow] / rates[fast]:.0f} % of "
        f"rank {fast} on node {nodes[fast]}, and has {100 * share:.0f} % of the time of its cores; expected "
        f"{100 * _MIN_RATE:.0f} % or more; look there for other programs, a low clock or heat, or leave the node out"
    )


def _rates_by_rank(report: Path) -> dict[int, float]:
    """Return the FLOP/s of each rank. They include the time in which other programs had its cores, unless these have part of all
    cores, which `hpcai doctor` reports."""
    paces = {int(rank): pace for rank, pace in _read_json(report)["network"]["paces"].items()}
    loaded = max(pace["share"] for pace in paces.values()) < _MIN_SHARE
    return {rank: pace["rate"] * (1.0 if loaded else pace["share"]) for rank, pace in paces.items()}


def read_rates(report: Path) -> dict[str, float | None]:
    """Return the rates in a report of `hpcai doctor --ranks`. Those of collectives are bus bandwidths, as in NCCL's tests."""
    content, rates = _read_json(report), _rates_by_rank(report).values()
    network, ranks = content["network"], len(content["members"])
    factors = {"sums": 2 * (ranks - 1) / ranks, "all_to_all": (ranks - 1) / ranks}
    buses = {}
    for name, factor in factors.items():
        size, seconds = max(((int(size), s) for size, s in network[name].items()), default=(0, 1.0))
        buses[name] = factor * size / seconds / 1e9 if size else None
    links, folders = network["links"], list(content["storage"]["run"].values())
    disk = {name: min((folder[name] / 1e9 for folder in folders if folder[name]), default=None) for name in ("write", "read")}
    return {
        "all_reduce": buses["sums"], "all_to_all": buses["all_to_all"],
        "link_latency": median(link["latency"] for link in links) * 1e6 if links else None,
        "link_rate": median(link["rate"] for link in links) / 1e9 if links else None,
        "slowest_rank": 100 * min(rates) / max(rates), "disk_write": disk["write"], "disk_read": disk["read"],
    }  # fmt: skip


def checkpoint_rate(run: Path) -> float | None:
    """Return the GB per second of the last checkpoint of a run."""
    saves = [event for event in read_metrics(run / METRICS) if event["kind"] == "checkpoint"]
    return saves[-1]["bytes"] / saves[-1]["seconds"] / 1e9 if saves else None


def job_end(folder: Path) -> tuple[float | None, str]:
    """Return the seconds from the kill of a rank to the end of its job, and what is wrong with this end, or ""."""
    killed, ended = folder / "killed.txt", folder / "killed_code"
    if not killed.is_file():
        return None, f"no rank was killed: the run ended before its first checkpoint; see {folder.resolve() / 'killed.err'}"
    rank, node, time = killed.read_text().split()
    code, end = ended.read_text().split()
    seconds = float(end) - float(time)
    if code == "0" or seconds > _MAX_END:
        how = "with exit code 0" if code == "0" else f"after {seconds:.0f} s, expected {_MAX_END:.0f} or less"
        return seconds, f"rank {rank} on node {node} was killed, and the job ended {how}; see the launcher's options"
    return seconds, ""


def find_difference(run: Path, resumed: Path) -> str:
    """Return the tensors of the last checkpoint that differ between two runs, bit for bit, or "" if none does."""
    first, second = _last_tensors(run), _last_tensors(resumed)
    if not first or first.keys() != second.keys():
        return f"{run.name} and {resumed.name} have other last checkpoints: {', '.join(sorted(first.keys() ^ second.keys())[:2])}"
    different = [name for name in first if first[name] != second[name]]
    advice = "a resumed job does not equal an uninterrupted one: hpcai verify-resume finds the step"
    return f"{', '.join(different[:3])} and {len(different)} tensors in all differ after a resume; {advice}" if different else ""


def _last_tensors(run: Path) -> dict[str, bytes]:
    """Return the tensors of the last checkpoint by its name, that of the file, and their own."""
    folder = max((run / "checkpoints").glob("step-*"), default=run)
    files = sorted(folder.glob("tensors-*.safetensors"))
    return {f"{folder.name} {file.stem} {name}": value for file in files for name, value in _read_tensors(file).items()}


def _read_tensors(file: Path) -> dict[str, bytes]:
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {name: data[start + begin : start + end] for name, entry in header.items() for begin, end in [entry["data_offsets"]]}


def _read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
