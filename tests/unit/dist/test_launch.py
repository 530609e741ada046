"""Rank and world size from recorded environments of launchers, and the start of a job."""

import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hpcai import dist
from hpcai.dist import launch
from hpcai.dist.environment import SINGLE_PROCESS, RankInfo, expand_hostlist, read_rank_info
from hpcai.dist.launch import select_device
from hpcai.dist.watchdog import Watchdog, _Hub, _read_messages
from hpcai.errors import LaunchError, MeshError
from tests.reference_data import load_json

CASES = yaml.safe_load((Path(__file__).parent / "environments.yaml").read_text())
BY_NAME = {case["name"]: case["environ"] for case in CASES}
SRUN = BY_NAME["srun --mpi=none -N2 -n4"]
INCONSISTENT = yaml.safe_load((Path(__file__).parent / "inconsistent.yaml").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_rank_info(case: dict[str, Any]) -> None:
    assert read_rank_info(case["environ"]) == RankInfo(**case["rank_info"])


@pytest.mark.parametrize("case", INCONSISTENT, ids=lambda case: case["message"])
def test_inconsistent_variables_are_an_error(case: dict[str, Any]) -> None:
    environ = BY_NAME.get(case["from"], {}) | case["change"]
    with pytest.raises(LaunchError, match=case["message"].replace("(", r"\(")):
        read_rank_info({name: value for name, value in environ.items() if value is not None})


def test_ports_of_neighbouring_jobs_and_steps_differ() -> None:
    ports = [
        read_rank_info(SRUN | {"SLURM_JOB_ID": str(j), "SLURM_STEP_ID": str(k)}).port for j in range(4000, 4100) for k in range(8)
    ]
    assert len(set(ports)) == len(ports)
    assert all(port is not None and 20000 <= port < 32768 for port in ports)


@pytest.mark.parametrize(
    ("local_rank", "visible", "expected"),
    [(0, 0, "cpu"), (3, 0, "cpu"), (0, 1, "cuda:0"), (3, 1, "cuda:0"), (None, 1, "cuda:0"), (0, 4, "cuda:0"), (3, 4, "cuda:3")],
)
def test_device(local_rank: int | None, visible: int, expected: str) -> None:
    assert select_device(RankInfo("srun", 5, 8, local_rank, 4), visible) == torch.device(expected)


def test_too_few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    info = RankInfo("srun", 6, 8, 2, 4)
    with pytest.raises(LaunchError, match="local rank 2 finds only 2 visible GPUs; .*srun --gpus-per-node=N --gpu-bind=none"):
        select_device(info, 2)
    monkeypatch.setenv("HPCAI_SHARE_GPU", "1")
    assert select_device(info, 2) == torch.device("cuda:0")


def test_two_ranks_on_one_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU 0 of each task may be the same physical GPU."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("Properties", (), {"uuid": "GPU-1"}))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    device = torch.device("cuda:0")
    launch._claim_gpu(device, RankInfo("srun", 0, 2, 0, 2), store)
    launch._claim_gpu(device, RankInfo("srun", 0, 2, 0, 2), store)
    with pytest.raises(LaunchError, match="rank 1 and rank 0 both use GPU GPU-1; .*--gpu-bind=none.* local rank"):
        launch._claim_gpu(device, RankInfo("srun", 1, 2, 1, 2), store)
    monkeypatch.setenv("HPCAI_SHARE_GPU", "1")
    launch._claim_gpu(device, RankInfo("srun", 1, 2, 1, 2), store)


@pytest.mark.parametrize(("hosts", "names"), load_json("host_lists"))
def test_host_lists(hosts: str, names: list[str]) -> None:
    assert expand_hostlist(hosts) == names


def test_exceptions_of_a_single_process_propagate(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(launch, "read_rank_info", lambda: SINGLE_PROCESS)
    monkeypatch.setattr(launch, "retain_freed_memory", lambda: None)  # other tests measure freed memory in this process
    with pytest.raises(ValueError, match="mine"), dist.start({"replicate": -1}) as mesh:
        assert mesh.world == 1
        raise ValueError("mine")
    with pytest.raises(SystemExit) as stop, dist.start({}):
        sys.exit(85)
    assert stop.value.code == 85
    with pytest.raises(MeshError, match="needs 2 processes, but 1 was started"), dist.start({"axial": 2}):
        pass
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("text", ["soon", "0", "-5", "inf", "nan"])
def test_timeout_is_checked(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCAI_TIMEOUT", text)
    with pytest.raises(LaunchError, match="HPCAI_TIMEOUT"):
        launch._read_timeout()


def test_a_given_device_initializes_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_set_device", lambda info: pytest.fail("looked for a GPU"))
    with launch.start({}, device=torch.device("cpu")) as mesh:
        assert mesh.device.type == "cpu"


def test_a_missing_gpu_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert launch.explain_missing_gpu(cpu) is None
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    text = str(launch.explain_missing_gpu(cpu))
    assert "built for CUDA 13.0, finds no GPU" in text and "--nv" in text
    assert launch.explain_missing_gpu(torch.device("cuda")) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert launch.explain_missing_gpu(cpu) is None


INVALID = [
    b"GET / HTTP/1.0\r\n\r\n", b"5\n", b"", b'{"rank": "x"}\n', b'{"rank": 0, "name": "me", "token": "guess"}\n',
    b'{"failed": "a lie", "code": 0, "refused": true}\n', b'{"rank": 0}\n{"left": 0}\n', b"x" * 100_000,
    b'{"token": ["secret"], "rank": 0}\n', b"[" * 4000 + b"\n",
    b'{"token": "secret", "rank": 7}\n', b'{"token": "secret", "rank": 1e300}\n', b"\xff\n",
]  # fmt: skip


def test_the_hub_ignores_connections_without_the_token() -> None:
    """Security scanners connect to all open ports of a compute node, and other users may try to end a job."""
    store = torch.distributed.HashStore()
    with Watchdog(0, 1, "127.0.0.1", store, os._exit, "secret"):
        for data in INVALID * 30:
            with socket.create_connection(("127.0.0.1", int(store.get("hub")))) as connection, suppress(OSError):
                connection.sendall(data)
        time.sleep(0.1)
        assert [thread.name for thread in threading.enumerate() if thread.name == "hpcai-hub"], "the hub is still there"
    assert {thread.name for thread in threading.enumerate() if thread.name.startswith("hpcai")} <= {"hpcai-waits"}


def test_a_failure_never_has_exit_code_0_and_control_characters_are_escaped(capfd: pytest.CaptureFixture[str]) -> None:
    hub = _Hub(3, "secret", "127.0.0.1")
    assert hub._socket.getsockname()[0] == "127.0.0.1"
    threading.Thread(target=hub.serve, daemon=True).start()
    with socket.create_connection(("127.0.0.1", hub.port), timeout=10) as connection:
        connection.sendall(b'{"token": "guess", "rank": 1, "name": "me"}\n')
        assert connection.recv(1) == b"", "a connection without the token is closed, and blocks no rank"
    ranks = [socket.create_connection(("127.0.0.1", hub.port)) for _ in range(3)]
    for rank, client in enumerate(ranks):
        client.sendall(json.dumps({"token": "secret", "rank": rank, "name": f"rank {rank}"}).encode() + b"\n")
    ranks[1].sendall(b'{"failed": "text", "report": "\\u001b[2J\\u001b]0;title\\u0007red", "code": 0, "refused": false}\n')
    time.sleep(0.1)  # a consequence on another rank is not reported as the cause
    ranks[0].sendall(b'{"failed": "peer closed", "report": "peer closed", "code": 1, "refused": false}\n')
    joined, message = map(json.loads, islice(ranks[2].makefile(), 2))
    assert joined == {"joined": True}
    assert (message["code"], message["first"], message["stop"]) == (1, 1, "rank 1 failed: text")
    assert capfd.readouterr().err == "rank 1: \\x1b[2J\\x1b]0;title\\x07red\n"


def test_a_message_may_arrive_in_chunks() -> None:
    near, far = socket.socketpair()
    with near, far:
        messages = _read_messages(near)
        for chunk in (b'{"a": 1}\n{"b', b'": 2}\n'):
            far.sendall(chunk)
            assert next(messages) == ({"a": 1} if b"a" in chunk else {"b": 2})


def test_the_store_of_one_node_listens_on_its_loopback_alone() -> None:
    store = launch._serve_store("127.0.0.1", 0, True)
    ports = [line.split() for file in ("tcp", "tcp6") for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]]
    address = f":{store.port:04X}"
    assert [fields[1] for fields in ports if fields[3] == "0A" and fields[1].endswith(address)] == [f"0100007F{address}"]
    client = torch.distributed.TCPStore("127.0.0.1", store.port, None, False)
    client.set("a", "b")
    assert store.get("a") == b"b"
