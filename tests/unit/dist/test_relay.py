"""An archive on several "nodes", processes with folders of their own: who reads, what arrives, and what ends all of them."""

import io
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hpcai.dist import relay
from hpcai.dist.environment import Place
from hpcai.errors import DataError, HpcaiError
from tests.archives import tiny

ROOT = Path(__file__).parents[3]


class Nodes:
    """Processes as ``srun --ntasks-per-node=1`` starts them. Only the first finds the archive."""

    def __init__(self, home: Path) -> None:
        self.home, self.running = home, list[subprocess.Popen[str]]()

    def target(self, rank: int) -> Path:
        return self.home / f"n{rank}" / "env"

    def start(self, file: Path, count: int, own: Callable[[int], dict[str, str]] = lambda _: {}, small_disk: int = -1) -> None:
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        for rank in range(count):
            about = {
                "PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(count),
                "SLURM_STEP_TASKS_PER_NODE": f"1(x{count})", "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank),
                "SLURM_LOCALID": "0", "SLURMD_NODENAME": f"n{rank}", "HPCAI_ADDRESS": "localhost", "MASTER_PORT": str(port),
                "HPCAI_TOKEN": "secret", "HPCAI_TIMEOUT": "4", "HERE": str(self.target(rank)), **own(rank),
            }  # fmt: skip
            words = [sys.executable, "-I", "-S", ROOT / "hpcai/dist/relay.py", file if rank == 0 else "/absent.tar", "$HERE"]
            limit = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))) if rank == small_disk else None
            self.running.append(
                subprocess.Popen(words, env=about, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=limit)
            )

    def ended(self, timeout: float = 20) -> tuple[list[int], list[str], list[str]]:
        """Exit codes, what was printed, and what was said of errors, by rank."""
        said = [process.communicate(timeout=timeout) for process in self.running]
        print(said)
        codes = [process.returncode for process in self.running]
        self.running = []
        return codes, [out for out, _ in said], [err for _, err in said]

    def left(self) -> list[str]:
        """What there is beside and at the targets."""
        return sorted(str(path.relative_to(self.home)) for path in self.home.glob("n*/*"))


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


def content(folder: Path) -> dict[str, bytes | str]:
    files = [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]
    return {str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes() for path in files}


def failed(nodes: Nodes, timeout: float = 20) -> str:
    """What the first node said where all have failed, with nothing at any target."""
    codes, _, errors = nodes.ended(timeout)
    assert all(codes) and not nodes.left()
    return errors[0]


def test_one_reads_and_all_have_it_and_what_is_there_is_kept(nodes: Nodes, tmp_path: Path) -> None:
    """Six nodes are a tree of three levels. Then one has lost a file; then none has."""
    file = tiny(tmp_path / "tiny.tar", 5_000_000)
    nodes.start(file, 6)
    codes, printed, errors = nodes.ended()
    assert codes == [0] * 6 and not any(errors) and not any(printed[1:])
    assert re.fullmatch(r"environment: 0\.01 GB, 9 files on 6 nodes in [\d.]+ s, read once\n", printed[0]), printed
    found = [content(nodes.target(rank)) for rank in range(6)]
    assert all(one == found[0] for one in found) and len(found[0]) == 11 and found[0]["bin/python"] == "python3"
    assert os.access(nodes.target(5) / "bin/python3", os.X_OK) and not os.access(nodes.target(5) / "lib/part_0", os.X_OK)
    assert nodes.target(5).stat().st_mode & 0o777 == 0o700
    (nodes.target(2) / "lib/part_3").unlink()
    before = nodes.target(1).stat().st_ino
    nodes.start(file, 3)
    assert "on 3 nodes (2 had it) in" in nodes.ended()[1][0]
    assert content(nodes.target(2)) == found[0] and nodes.target(1).stat().st_ino == before
    nodes.start(file, 3)
    codes, printed, _ = nodes.ended()
    assert codes == [0] * 3 and printed[0].endswith("9 files, as before on 3 nodes; nothing was read\n")
    assert nodes.left() == [f"n{rank}/env" for rank in range(6)]


def test_one_node_needs_no_launcher_and_no_secret(tmp_path: Path) -> None:
    file = tiny(tmp_path / "tiny.tar")
    line = relay.unpack_everywhere(file, str(tmp_path / "env"), Place("alone", 0, 1, 0, 1))
    assert "9 files on 1 node in" in line and (tmp_path / "env" / relay.MANIFEST).exists()


def test_an_archive_that_is_cut_or_damaged_is_unpacked_nowhere(nodes: Nodes, tmp_path: Path) -> None:
    file = tiny(tmp_path / "tiny.tar")
    whole = file.read_bytes()
    file.write_bytes(whole[:-5000])
    nodes.start(file, 3)
    assert f"expected {len(whole)}; it was cut short" in failed(nodes)
    file.write_bytes(whole[:90_000] + bytes([whole[90_000] ^ 1]) + whole[90_001:])
    nodes.start(file, 3)
    assert re.search(r"node n\d \(rank \d\): what came has another SHA-256", failed(nodes))
    (tmp_path / "other.tar").write_bytes(bytes(20_000))
    nodes.start(tmp_path / "other.tar", 3)
    assert "no archive of an environment" in failed(nodes)


def test_a_full_disk_ends_all_and_is_named(nodes: Nodes, tmp_path: Path) -> None:
    nodes.start(tiny(tmp_path / "tiny.tar", 1_000_000), 4, small_disk=1)
    codes, _, errors = nodes.ended()
    assert codes == [1] * 4 and "node n1 (rank 1): [Errno 27] File too large" in errors[0] and not "".join(errors[1:])
    assert set(nodes.left()) <= {f"n{rank}/env" for rank in (0, 2, 3)}, "others may have it, whole"


@pytest.mark.parametrize("killed", [0, 1, 3])
def test_a_node_that_is_killed_ends_all_and_is_named(killed: int, nodes: Nodes, tmp_path: Path) -> None:
    """While it stands still the others wait for it: more lies ahead than fits between them. What it left goes the next time."""
    file = tiny(tmp_path / "tiny.tar", 80_000_000)
    nodes.start(file, 4, lambda _: {"HPCAI_TIMEOUT": "60"})
    process = nodes.running[killed]
    end = time.monotonic() + 20
    while not list(nodes.target(killed).parent.glob("env.partial-*/lib/part_0")):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGSTOP)
    time.sleep(0.3)
    assert any(other.poll() is None for other in nodes.running if other is not process)
    process.kill()
    began = time.monotonic()
    codes, _, errors = nodes.ended()
    assert time.monotonic() - began < 10 and all(codes)
    assert not any(nodes.target(rank).exists() for rank in range(4) if rank == killed or rank == 0)
    if killed:
        assert f"node n{killed} (rank {killed}): has vanished" in errors[0] and not "".join(errors[1:])
    else:
        assert all("the first node (localhost) has vanished" in text for text in errors[1:])
    left = [path for path in nodes.left() if "partial" in path]
    assert left and all(path.startswith(f"n{killed}/") for path in left)
    relay.unpack_everywhere(tiny(file), str(nodes.target(killed)), Place("alone", 0, 1, 0, 1))
    assert not any("partial" in path for path in nodes.left())


def test_who_does_not_know_the_token_gets_and_gives_nothing(nodes: Nodes, tmp_path: Path) -> None:
    nodes.start(tiny(tmp_path / "tiny.tar"), 2, lambda rank: {"HPCAI_TOKEN": f"secret {rank}", "HPCAI_TIMEOUT": "2"})
    codes, _, errors = nodes.ended()
    assert all(codes) and not nodes.left()
    assert "does not know this job's HPCAI_TOKEN" in errors[1]
    assert "after 2 s 1 of 2 processes had not come: ranks 1" in errors[0]


def test_a_process_that_never_comes_is_missed(nodes: Nodes, tmp_path: Path) -> None:
    nodes.start(tiny(tmp_path / "tiny.tar"), 2, lambda rank: {"SLURM_STEP_NUM_TASKS": "3", "HPCAI_TIMEOUT": "1"})
    assert "after 1 s 1 of 3 processes had not come: ranks 2" in failed(nodes)


def test_what_is_there_and_is_no_copy_is_left_alone(nodes: Nodes, tmp_path: Path) -> None:
    file = tiny(tmp_path / "tiny.tar")
    (nodes.target(1) / "mine").mkdir(parents=True)
    nodes.start(file, 2)
    assert "node n1 (rank 1): " in (said := nodes.ended()[2][0]) and "is there and holds no environment" in said
    assert nodes.left() == ["n1/env"] and os.listdir(nodes.target(1)) == ["mine"]
    relay.unpack_everywhere(file, str(tmp_path / "env"), Place("alone", 0, 1, 0, 1))
    with pytest.raises(DataError, match="holds another environment"):
        relay.unpack_everywhere(tiny(file, 200_000), str(tmp_path / "env"), Place("alone", 0, 1, 0, 1))
    (tmp_path / "env").chmod(0o777)
    with pytest.raises(DataError, match="no folder that you alone can write to"):
        relay.unpacked(tmp_path / "env")
    (tmp_path / "link").symlink_to(tmp_path / "env")
    with pytest.raises(DataError, match="no folder that you alone"):
        relay.unpacked(tmp_path / "link")


def test_a_python_that_does_not_start_there_is_told(tmp_path: Path) -> None:
    file = tiny(tmp_path / "tiny.tar")
    relay.unpack_everywhere(file, str(tmp_path / "env"), Place("alone", 0, 1, 0, 1))
    size = (tmp_path / "env/bin/python3").stat().st_size
    (tmp_path / "env/bin/python3").write_text("#!/bin/sh\necho GLIBC_2.99 is missing >&2; exit 1".ljust(size))
    with pytest.raises(DataError, match=r"does not start here: GLIBC_2\.99 is missing"):
        relay.unpack_everywhere(file, str(tmp_path / "env"), Place("alone", 0, 1, 0, 1))


@pytest.mark.parametrize(("place", "environ", "said"), [
    (Place("srun", 0, 4, 0, 2), {}, "2 processes on a node; expected one"),
    (Place("srun", 0, 4, 0, 1), {}, "HPCAI_TOKEN is not set"),
    (Place("PALS", 0, 4, 0, 1), {"HPCAI_TOKEN": "x"}, "the first node's name is not known"),
    (Place("PALS", 0, None, 0, 1), {"HPCAI_TOKEN": "x"}, "does not tell the number of processes"),
])  # fmt: skip
def test_what_the_launcher_does_not_tell(place: Place, environ: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HPCAI_TOKEN", "HPCAI_ADDRESS", "MASTER_ADDR", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(HpcaiError, match=said):
        relay.unpack_everywhere(Path("x.tar"), "/nowhere", place)


def test_in_a_container_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("APPTAINER_CONTAINER", "/images/x.sif")
    assert relay.main(["/absent.tar", "/nowhere/at/all"]) == 0
    assert "nothing to do in a container" in capsys.readouterr().out and not Path("/nowhere").exists()


def test_a_target_whose_variable_is_not_set_is_refused(nodes: Nodes, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'\$NOT_SET/env' names nothing here"):
        relay.unpack_everywhere(tiny(tmp_path / "tiny.tar"), "$NOT_SET/env", Place("alone", 0, 1, 0, 1))


def tar(*members: tuple[str, str]) -> io.BytesIO:
    """Members by name, each a text, or a link where it begins with ``->``, or another kind where it is one letter of tar's."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, what in members:
            info = tarfile.TarInfo(name)
            if what.startswith("->"):
                info.type, info.linkname = tarfile.SYMTYPE, what[2:]
            elif len(what) == 1:
                info.type, info.linkname = what.encode(), "a"
            else:
                info.size = len(what)
            archive.addfile(info, io.BytesIO(what.encode()))
    return io.BytesIO(made.getvalue())


HOSTILE: Sequence[Sequence[tuple[str, str]]] = [
    [("/etc/x", "text")], [("../x", "text")], [("a/../../x", "text")], [("a//x", "text")], [("./x", "text")],
    [("a", "->/etc"), ("a/x", "text")], [("a", "->/etc/passwd")], [("a", "->..")], [("d/a", "->../../x")], [("a", "->b/../..")],
    [("d/e", "->."), ("d/e/x", "text")], [("a", "->b"), ("a", "text")], [("a", "text"), ("b", "1")], [("fifo", "6")],
    [("device", "3")], [("folder", "5")],
]  # fmt: skip


@pytest.mark.parametrize("members", HOSTILE, ids=lambda members: " ".join(name + what for name, what in members))
def test_hostile_members_are_refused(members: Sequence[tuple[str, str]], tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(DataError, match="which is refused"):
        relay.extract(tar(*members), tmp_path / "in")
    assert os.listdir(tmp_path) == ["in"]


def test_links_that_stay_inside_are_made(tmp_path: Path) -> None:
    relay.extract(tar(("d/file", "text"), ("d/e/up", "->../file"), ("same", "->d/file")), tmp_path)
    assert (tmp_path / "d/e/up").read_text() == (tmp_path / "same").read_text() == "text"


def test_it_runs_on_an_old_python_of_the_system(tmp_path: Path) -> None:
    """Without hpcai, its packages, or what Python learnt since 3.9, if there is such a one."""
    found = (shutil.which(name) for name in ("python3.9", "python3.10", "python3.11", "python3.12", "python3"))
    old = next((name for name in found if name and subprocess.run([name, "-c", ""], capture_output=True).returncode == 0), None)
    if old is None:
        pytest.skip("there is no other Python on this machine")
    file = tiny(tmp_path / "tiny.tar")
    done = subprocess.run([old, "-I", "-S", ROOT / "hpcai/dist/relay.py", file, tmp_path / "env"], capture_output=True, text=True)
    assert done.returncode == 0 and "9 files on 1 node" in done.stdout, done.stderr
