"""The environment of a job on each node's own disk: one node reads its archive, and all have it from one another.

    srun --ntasks-per-node=1 python3 -I -S hpcai/dist/relay.py FILE.tar '/tmp/mine'

FILE.tar is what ``hpcai environment pack`` makes. One process on each node, of any Python from 3.9, on the standard library alone.
All meet at the first, which tells each from whom it gets the archive; they form a tree in which each node passes on to two. What
comes is unpacked while it comes, beside TARGET, and renamed to TARGET once its SHA-256 is that of the archive. A node that has it
already gets nothing. Every node keeps its connection to the first one: where one fails or vanishes, all end, and the first tells
which.

    HPCAI_TOKEN     a secret of the job, which slurm/job.sh draws: nobody else's archive is unpacked
    HPCAI_ADDRESS   name of the first node, where Slurm does not tell it; MASTER_PORT where its port is taken
    HPCAI_TIMEOUT   seconds that nodes wait for one another (120)
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import queue
import resource
import secrets
import selectors
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":  # by its path, under -I
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from hpcai.dist.environment import Place, expand, place
from hpcai.errors import DataError, HpcaiError, LaunchError

MANIFEST = "environment.json"
"""The archive's first member, and a file of the folder that it was unpacked to: what it holds."""
ROOM = 2048
"""Bytes of that member, so that it can be written last: JSON and spaces."""
BLOCK = 1 << 20
_AHEAD = 16  # blocks that come while others are being unpacked
_CHILDREN = 2
_LONGEST = 1 << 16  # bytes of a message
_PATIENCE = 5.0  # seconds in which a node whose neighbour is gone hears why, or a stranger says who it is
_CONTAINER = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")


class _StoppedError(HpcaiError):
    """The job has failed elsewhere, and the first node says where."""


class _LinkError(HpcaiError):
    """A neighbour is gone; why is its own to say, or the first node's to see."""


def main(argv: Sequence[str], program: str = "relay.py") -> int:
    """FILE.tar TARGET [NODES]: 0 where all nodes have it; otherwise the reason is on stderr."""
    if len(argv) not in (2, 3) or argv[0].startswith("-"):
        print(f"usage: srun --ntasks-per-node=1 {program} FILE.tar TARGET [NODES]\n\n{__doc__}", file=sys.stderr)
        return 2
    inside = next((os.environ[name] for name in _CONTAINER if os.environ.get(name)), None)
    if inside:
        print(f"environment: nothing to do in a container, whose image holds it ({inside})")
        return 0
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that nothing half unpacked stays
    try:
        line = unpack_everywhere(Path(argv[0]), argv[1], place(), int(argv[2]) if argv[2:] else None)
    except _StoppedError:  # which the first node tells for all
        return 1
    except (HpcaiError, OSError) as problem:
        print(f"environment: {problem}", file=sys.stderr)
        return 1
    if line:
        print(line)
    return 0


def unpack_everywhere(file: Path, target: str, where: Place, world: int | None = None) -> str:
    """Unpacks ``file``, which the first of ``world`` processes reads, to ``target`` on the node of each. All return at the end, the
    first with a line about it. Raises HpcaiError on all where one fails: on the first with the reason."""
    world = world or where.world
    if world is None:
        raise LaunchError(f"{where.launcher} does not tell the number of processes; give the number of nodes as a third word")
    if where.local_world not in (None, 1):
        raise LaunchError(f"{where.local_world} processes on a node; expected one: srun --ntasks-per-node=1, mpiexec --ppn 1")
    token, address, port = _meeting(where, world)
    hub = None
    if where.rank == 0:
        hub = _Hub(file, world, token, port)
        address, port = "localhost", hub.port
        hub.start()
    member = _Member(where.rank, address, port, token)
    try:
        member.take_part(file, target)
    except _StoppedError as problem:
        raise (_StoppedError if hub is None else DataError)(str(problem)) from None
    finally:
        if hub:
            hub.join(_PATIENCE)
    return hub.summary if hub else ""


def _meeting(where: Place, world: int, environ: Mapping[str, str] = os.environ) -> tuple[bytes, str, int]:
    """The job's secret, and the address and the port of its first node. Raises LaunchError."""
    if world == 1:
        return secrets.token_bytes(16), "localhost", 0
    if not environ.get("HPCAI_TOKEN"):
        raise LaunchError("HPCAI_TOKEN is not set; give all nodes one secret: export HPCAI_TOKEN=$(openssl rand -hex 16)")
    hosts = expand(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "")
    address = environ.get("HPCAI_ADDRESS") or environ.get("MASTER_ADDR") or next(iter(hosts), "")
    if not address:
        raise LaunchError(f"{where.launcher}: the first node's name is not known; set HPCAI_ADDRESS, alike for all")
    job = "".join(filter(str.isdigit, environ.get("SLURM_JOB_ID") or environ.get("PBS_JOBID", "").partition(".")[0])) or "0"
    step = environ.get("SLURM_STEP_ID", "0")
    port = where.port or int(environ.get("MASTER_PORT") or 20000 + (8 * int(job) + int(step)) % 12768)
    return environ["HPCAI_TOKEN"].encode(), address, port


def _timeout() -> float:
    return float(os.environ.get("HPCAI_TIMEOUT") or 120)


# ---- Connections -----------------------------------------------------------------------------------------------------------------


class _Line:
    """A connection whose two ends have shown one another that they know the job's token (HMAC-SHA256 of two fresh numbers)."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        line.settimeout(_timeout())
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):  # a dead node is seen in 30 s
            if hasattr(socket, name):
                line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def greet(self, token: bytes, calling: bool) -> bool:
        """Whether the other end knows the token."""
        own, roles = secrets.token_bytes(16), (b"calls", b"hears")
        self.line.settimeout(_PATIENCE)
        self.line.sendall(own)
        other = self._exactly(16)
        numbers = own + other if calling else other + own
        mine, theirs = (hmac.new(token, role + numbers, "sha256").digest() for role in (roles if calling else roles[::-1]))
        self.line.sendall(mine)
        known = hmac.compare_digest(self._exactly(32), theirs)
        self.line.settimeout(_timeout())
        return known

    def send(self, **message: Any) -> None:
        text = json.dumps(message).encode()
        self.line.sendall(len(text).to_bytes(4, "big") + text)

    def receive(self) -> dict[str, Any]:
        size = int.from_bytes(self._exactly(4), "big")
        if size > _LONGEST:
            raise ConnectionError(f"a message of {size} bytes")
        found: dict[str, Any] = json.loads(self._exactly(size))
        return found

    def blocks(self, size: int) -> Iterator[bytes]:
        while size:
            block = self.line.recv(min(size, BLOCK))
            if not block:
                raise ConnectionError("it is closed")
            size -= len(block)
            yield block

    def _exactly(self, size: int) -> bytes:
        return b"".join(self.blocks(size))


def _call(address: str, port: int, token: bytes) -> _Line:
    """A connection to a node, which may be late. Raises LaunchError."""
    end = time.monotonic() + _timeout()
    while True:
        try:
            line = _Line(socket.create_connection((address, port), timeout=_PATIENCE))
            break
        except OSError as problem:
            if time.monotonic() > end:
                raise LaunchError(
                    f"{socket.gethostname()}: nobody answers on {address}:{port} ({problem}); set HPCAI_ADDRESS to the first "
                    "node's name on a network that all nodes share, MASTER_PORT to a free port"
                ) from None
            time.sleep(0.1)
    with suppress(OSError):
        if line.greet(token, calling=True):
            return line
    raise LaunchError(f"{socket.gethostname()}: {address}:{port} does not know this job's HPCAI_TOKEN; give all nodes the same one")


def _listen(port: int, alone: bool = False) -> socket.socket:
    try:
        if alone:
            return socket.create_server(("localhost", port))
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", port), family=family, backlog=4096, dualstack_ipv6=both)
    except OSError as problem:
        raise LaunchError(f"{socket.gethostname()}: port {port} cannot be used ({problem}); set MASTER_PORT") from None


def _accept(listener: socket.socket, token: bytes, end: float) -> _Line:
    """The next connection that knows the token; others are dropped. Raises TimeoutError."""
    while True:
        listener.settimeout(max(end - time.monotonic(), 0.01))
        line = _Line(listener.accept()[0])
        with suppress(OSError):
            if line.greet(token, calling=False):
                return line
        line.line.close()


# ---- The first node's list of all ------------------------------------------------------------------------------------------------


class _Hub(threading.Thread):
    """On the first node: all come here, are told their places in the tree, and say how it ended."""

    def __init__(self, file: Path, world: int, token: bytes, port: int) -> None:
        super().__init__(daemon=True)
        self.file, self.world, self.token = file, world, token
        self.listener = _listen(port, alone=world == 1)
        self.port = self.listener.getsockname()[1]
        self.began = time.monotonic()
        self.summary = ""
        with suppress(OSError, ValueError):
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    def run(self) -> None:
        members: dict[int, tuple[_Line, dict[str, Any]]] = {}
        failed = ""
        try:
            self._gather(members)
            self._lead(members, manifest(self.file))
        except Exception as problem:
            failed = str(problem) or repr(problem)
        for line, _ in members.values():
            with suppress(OSError):
                line.send(failed=failed)

    def _gather(self, members: dict[int, tuple[_Line, dict[str, Any]]]) -> None:
        end = self.began + _timeout()
        while len(members) < self.world:
            try:
                line = _accept(self.listener, self.token, end)
                words = line.receive()
            except socket.timeout:  # noqa: UP041 (TimeoutError is another class before Python 3.10)
                absent = [str(rank) for rank in range(self.world) if rank not in members]
                raise LaunchError(
                    f"after {_timeout():.0f} s {len(absent)} of {self.world} processes had not come: ranks {', '.join(absent[:8])}"
                ) from None
            except (OSError, ValueError):
                continue
            if words["rank"] in members:
                raise LaunchError(f"two processes are rank {words['rank']}; unset what another launcher left")
            members[words["rank"]] = line, words

    def _lead(self, members: dict[int, tuple[_Line, dict[str, Any]]], about: dict[str, Any]) -> None:
        """Tells all their places, and hears of their ends. Raises HpcaiError."""
        needing = [rank for rank in sorted(members) if members[rank][1]["have"] != about["digest"]]
        tree = [0, *(rank for rank in needing if rank)] if needing else []
        for rank, (line, _) in members.items():
            at = tree.index(rank) if rank in tree else None
            above = members[tree[(at - 1) // _CHILDREN]] if at else None
            below = len(tree[_CHILDREN * at + 1 : _CHILDREN * at + 1 + _CHILDREN]) if at is not None else 0
            parent = above and [None if above is members[0] else above[0].line.getpeername()[0], above[1]["port"], above[1]["name"]]
            line.send(about=about, parent=parent, children=below, passing=at is not None, needed=rank in needing)
        self._hear(members)
        seconds, nodes = time.monotonic() - self.began, f"{self.world} node{'s' * (self.world > 1)}"
        what = f"environment: {about['bytes'] / 1e9:.2f} GB, {about['files']:,} files"
        had = f" ({self.world - len(needing)} had it)" * (len(needing) < self.world)
        said = f" on {nodes}{had} in {seconds:.1f} s, read once" if needing else f", as before on {nodes}; nothing was read"
        self.summary = what + said

    def _hear(self, members: dict[int, tuple[_Line, dict[str, Any]]]) -> None:
        left = selectors.DefaultSelector()
        for line, words in members.values():
            left.register(line.line, selectors.EVENT_READ, (line, words))
        while left.get_map():
            for key, _ in left.select():
                line, words = key.data
                left.unregister(line.line)
                try:
                    failed = line.receive()["failed"]
                except (OSError, ValueError):
                    failed = "has vanished; was it killed?"
                if failed:
                    raise DataError(f"node {words['name']} (rank {words['rank']}): {failed}")


# ---- Each node -------------------------------------------------------------------------------------------------------------------


class _Member:
    """One node's part: what comes is passed on by a thread, and unpacked by this one."""

    def __init__(self, rank: int, address: str, port: int, token: bytes) -> None:
        self.rank, self.address, self.token = rank, address, token
        self.name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self.listener = _listen(0)
        self.line = _call(address, port, token)
        self.verdict: str | None = None
        self.told = threading.Event()
        self.come: queue.Queue[bytes | Exception] = queue.Queue(_AHEAD)
        self.sha = hashlib.sha256()

    def take_part(self, file: Path, target: str) -> None:
        """Raises _StoppedError with the reason where this node or another fails."""
        failed = folder = None
        try:
            folder = Path(os.path.abspath(_here(target)))
            have = unpacked(folder)
        except (HpcaiError, OSError) as problem:
            have, failed = "", str(problem)
        self.line.send(rank=self.rank, name=self.name, port=self.listener.getsockname()[1], have=have)
        plan = self._answer()
        threading.Thread(target=self._wait_for_verdict, daemon=True).start()
        try:
            if failed or folder is None:
                raise DataError(failed)
            if plan["passing"]:
                threading.Thread(target=self._pass_on, args=(file, plan), daemon=True).start()
                self._take(folder, plan)
            _try(folder)
        except _StoppedError:
            pass
        except _LinkError as problem:  # the one that is gone, or the first node, says more
            if not self.told.wait(_PATIENCE):
                self._say(str(problem))
        except (HpcaiError, OSError, tarfile.TarError, EOFError) as problem:
            self._say(str(problem) or repr(problem))
        else:
            self._say("")
        self.told.wait()
        if self.verdict:
            raise _StoppedError(self.verdict)

    def _answer(self) -> dict[str, Any]:
        self.line.line.settimeout(_timeout() + _PATIENCE)  # the first node waits less, and says for whom
        try:
            plan = self.line.receive()
        except (OSError, ValueError) as problem:
            self._lost_first(problem)
        if "failed" in plan:
            raise _StoppedError(plan["failed"])
        return plan

    def _say(self, failed: str) -> None:
        with suppress(OSError):
            self.line.send(failed=failed)

    def _lost_first(self, problem: Exception) -> NoReturn:
        raise LaunchError(f"{self.name}: the first node ({self.address}) has vanished: {problem}") from None

    def _wait_for_verdict(self) -> None:
        self.line.line.settimeout(None)
        try:
            self.verdict = self.line.receive()["failed"]
        except (OSError, ValueError) as problem:
            self.verdict = f"the first node ({self.address}) has vanished: {problem}"
            print(f"environment: {self.name}: {self.verdict}", file=sys.stderr, flush=True)
        self.told.set()

    def _pass_on(self, file: Path, plan: dict[str, Any]) -> None:
        """From the file, or the node above, to the nodes below, and to whom unpacks it here. Its own failures go there, too."""
        try:
            size, above, lines = plan["about"]["size"] - plan["about"]["from"], plan["parent"], []
            if above:
                source = _call(above[0] or self.address, above[1], self.token).blocks(size)
            else:
                source = _read(file, plan["about"])
            end = time.monotonic() + _timeout()
            lines = [_accept(self.listener, self.token, end) for _ in range(plan["children"])]
            for block in source:
                self.sha.update(block)
                for line in lines:
                    line.line.sendall(block)
                self.come.put(block)
            self.come.put(b"")
        except DataError as problem:
            self.come.put(problem)
        except (OSError, HpcaiError) as problem:
            who = f"between this node and {above[2]} above or those below" if above else "to the nodes below"
            self.come.put(_LinkError(f"the connection {who} broke: {problem}"))

    def read(self, _: int) -> bytes:
        """The next block of the archive, as tarfile asks for it; nothing at its end."""
        while True:
            if self.verdict:
                raise _StoppedError(self.verdict)
            try:
                block = self.come.get(timeout=0.2)
            except queue.Empty:
                continue
            if isinstance(block, Exception):
                raise block
            return block

    def _take(self, folder: Path, plan: dict[str, Any]) -> None:
        """The archive as it comes, into ``folder``, or past it where it is there already."""
        about = plan["about"]
        if not plan["needed"]:
            while self.read(BLOCK):
                pass
            return
        with _beside(folder, about["bytes"]) as partial:
            extract(self, partial)
            while self.read(BLOCK):  # the zeros behind the last member
                pass
            if self.sha.hexdigest() != about["digest"]:
                raise DataError("what came has another SHA-256 than what was packed; pack the environment again")
            if about.get("venv"):
                text = about["venv"].replace("@HERE@", str(folder))
                (partial / "pyvenv.cfg").write_text(text)
            (partial / MANIFEST).write_text(json.dumps(about))
            _rename(partial, folder, about["digest"])


def _here(text: str) -> str:
    found = os.path.expanduser(os.path.expandvars(text))
    if "$" in found or not found.strip():
        raise DataError(f"{text!r} names nothing here: a variable is not set")
    return found


# ---- Files -----------------------------------------------------------------------------------------------------------------------


def manifest(file: Path) -> dict[str, Any]:
    """What the archive ``file`` says that it holds; beyond that of ``hpcai environment pack``, ``from``: where the rest begins.
    Raises DataError."""
    try:
        with file.open("rb") as opened:
            head = opened.read(tarfile.BLOCKSIZE + ROOM)
            size = os.fstat(opened.fileno()).st_size
        first = tarfile.TarInfo.frombuf(head[: tarfile.BLOCKSIZE], "utf-8", "strict")
        if first.name != MANIFEST or first.size != ROOM:
            raise ValueError(f"it begins with {first.name!r}")
        about: dict[str, Any] = json.loads(head[tarfile.BLOCKSIZE :])
    except (OSError, ValueError, tarfile.TarError) as problem:
        raise DataError(f"{file}: no archive of an environment ({problem}); make it: hpcai environment pack {file}") from None
    if size != about["size"]:
        raise DataError(f"{file}: {size} bytes, expected {about['size']}; it was cut short: copy it again, or pack it again")
    return {**about, "from": len(head)}


def _read(file: Path, about: Mapping[str, Any]) -> Iterator[bytes]:
    left = about["size"] - about["from"]
    with file.open("rb", buffering=0) as opened:
        opened.seek(about["from"])
        while left:
            block = opened.read(min(BLOCK, left))
            if not block:
                raise DataError(f"{file}: ended {left} bytes early; it has changed while it was read")
            left -= len(block)
            yield block


def unpacked(folder: Path) -> str:
    """The digest of the environment that ``folder`` holds, whole; nothing where there is none, or one with files missing. Raises
    DataError where something else is there."""
    if not os.path.lexists(folder):
        return ""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise DataError(f"{folder}: is there and is no folder that you alone can write to; name another one")
    try:
        about = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        raise DataError(f"{folder}: is there and holds no environment; name another folder, or delete it") from None
    return str(about["digest"]) if _count(folder, about) else ""


def _count(folder: Path, about: Mapping[str, Any]) -> bool:
    """Whether files and bytes are as many as were packed: something may tidy a node's disk by age. Compiled code may have come."""
    files = size = 0
    for where, _, names in os.walk(folder):
        for name in names:
            found = os.lstat(os.path.join(where, name))
            if stat.S_ISREG(found.st_mode):
                files, size = files + 1, size + found.st_size
    return files >= about["files"] and size >= about["bytes"]


def check(member: tarfile.TarInfo, links: set[str]) -> None:
    """Refuses what could leave the folder: names with a root or ``..``, names below one of ``links``, links with a root, with
    ``..`` behind other parts or with too many of them, devices. Then no name can lead out, whatever links lead to. Raises
    DataError."""
    parts = member.name.split("/")
    problem = ""
    if not member.name or any(part in ("", ".", "..") for part in parts):
        problem = "its name is not plain"
    elif any("/".join(parts[:count]) in links for count in range(1, len(parts) + 1)):
        problem = "it lies below a link, or comes twice"
    elif member.issym():
        to = member.linkname.split("/")
        ups = next((at for at, part in enumerate(to) if part != ".."), len(to))
        if ups > len(parts) - 1 or any(part in ("", ".", "..") for part in to[ups:]):
            problem = f"it is a link to {member.linkname}"
        links.add(member.name)
    elif not member.isreg():
        problem = "it is no file and no link"
    if problem:
        raise DataError(f"the archive holds {member.name!r}, which is refused: {problem}; pack the environment again")


def extract(stream: Any, folder: Path) -> None:
    """The files and links of a tar ``stream``, of which ``read`` gives the next bytes. Raises DataError, OSError, TarError."""
    links: set[str] = set()
    made = {folder}
    with tarfile.open(fileobj=stream, mode="r|", bufsize=BLOCK) as tar:
        for member in tar:
            tar.members = []  # type: ignore[attr-defined]  # otherwise it keeps all that went by: 100 MB of a large environment
            check(member, links)
            path = folder / member.name
            if path.parent not in made:
                path.parent.mkdir(parents=True, exist_ok=True)
                made.add(path.parent)
            if member.issym():
                path.symlink_to(member.linkname)
                continue
            source = tar.extractfile(member)
            assert source is not None
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o777 if member.mode & 0o100 else 0o666), "wb") as target:
                shutil.copyfileobj(source, target, BLOCK)
                target.flush()
                os.utime(target.fileno(), (member.mtime, member.mtime))  # by which Python knows its compiled code


@contextmanager
def _beside(folder: Path, size: int) -> Iterator[Path]:
    """A fresh folder beside ``folder`` for ``size`` bytes, gone at the end, as are those that killed processes left. Raises
    DataError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for old in folder.parent.glob(f"{folder.name}.partial-*"):
        with suppress(OSError), _locked(old):
            shutil.rmtree(old, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free
    if free < size:
        raise DataError(f"{folder.parent} has {free / 1e9:.1f} GB free, the environment needs {size / 1e9:.1f}; name another disk")
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
    try:
        with _locked(partial):
            yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Raises OSError where another process holds it; who is killed lets go."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(opened)


def _rename(partial: Path, folder: Path, digest: str) -> None:
    """Where another job, or another node of this disk, was faster, theirs is kept. Raises DataError."""
    if os.path.lexists(folder) and unpacked(folder) == "":  # files are missing: nobody can work with it
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.partial-", dir=folder.parent) as old, suppress(FileNotFoundError):
            folder.rename(Path(old, "damaged"))
    try:
        partial.rename(folder)
    except OSError:
        if unpacked(folder) != digest:
            raise DataError(f"{folder}: holds another environment; name another folder, or delete it") from None


def _try(folder: Path) -> None:
    """Whether its Python starts there. Raises DataError."""
    python = folder / "bin" / "python"
    try:
        done = subprocess.run([python, "-I", "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise DataError(f"{python} does not start here: {problem}") from None
    if done.returncode or os.path.realpath(done.stdout.strip()) != os.path.realpath(folder):
        said = done.stderr.strip().splitlines()
        raise DataError(f"{python} does not start here: {said[-1] if said else 'it takes another folder for its own'}")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
