"""When one rank fails, all ranks stop, with the traceback of the rank that failed first.

Every rank keeps one connection to a hub, a thread on rank 0. A rank that fails says so; a rank that is killed says nothing, but
its connection closes. The hub lets the first one print its traceback and then tells all others to stop. No rank polls and no
heartbeat is missed while a long C call holds the interpreter.

A rank may ask that all stop at the same place (``boundary``): the hub hears how far each has come and says where.

A rank may say that the others can do without it (``spare``), such as one that only evaluates. When such a one is killed the others
hear of it (``lost``) and go on; all that are spare then end, as they work together.

A rank whose main thread is inside a collective or a long computation cannot be asked to leave, so it is ended where it is.
Losing the hub counts as a failure of rank 0; rank 0 therefore leaves last.

The hub listens on the loopback interface where all ranks share a node. It hears a connection only once that has shown the token of
the job, and drops one that says anything but our few words, each of bounded length.
"""

import hmac
import json
import os
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as torch_dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hpcai.dist.boundary import PAST, Boundary
from hpcai.errors import ConfigError, HpcaiError, LaunchError, MeshError

# All in seconds
_SETTLE = 0.3  # in which a consequence on another rank ("connection closed by peer") may arrive before its cause
_SETTLE_OURS = 2.0  # for all ranks to report a refusal, which is mostly the same on all and is then printed once
_PATIENCE = 8.0  # that a failing rank waits for the hub
_LAST_WORDS = 0.5  # from the word to stop until the rank that failed first ends the job with its exit code
_LAST_RESORT = 2.0  # from that word until the other ranks end by themselves, so that the launcher sees the cause first
# In bytes
_LONGEST_WORD = 1 << 18  # of a rank
_LONGEST_TEXT = 1 << 15  # of the reason for a failure
_LONGEST_GREETING = 1 << 12  # of a connection that has not shown the token
_LONGEST_DOING = 200  # of what a rank says that it does
_LONGEST_ASKED = 40  # of the name of a signal
_STRANGERS = 256  # connections without a token that are held at a time


last_words: list[Callable[[str], object]] = []
"""Called with the reason on a rank that is ended because another failed, for two seconds at most."""

before_groups_end: list[Callable[[], object]] = []
"""Called before the process groups are destroyed, to let go of what holds them."""

_joined: list["Watch"] = []


class Watch:
    """Binds the ranks of a job together while its ``with`` block runs.

    ``address`` is rank 0's, ``store`` tells the others the hub's port, ``abort`` ends the job with an exit code, and only the ranks
    know the ``token``. An orderly end destroys the process groups. The exit code is 2 for refused settings, otherwise 1; SystemExit
    keeps its own.
    """

    def __init__(
        self, rank: int, world: int, address: str, store: torch_dist.Store, abort: Callable[[int], Any], token: str = "",
    ) -> None:  # fmt: skip
        self._rank, self._name = rank, f"rank {rank} on {socket.gethostname()}"
        self.store, self._abort = store, abort
        self._lock, self._answered = threading.Lock(), threading.Event()
        self._failing = self._stopping = self._leaving = self._printed = False
        self._words = self.lost = ""
        self._spare, self.losing = False, threading.Event()
        self._stop: dict[str, Any] | None = None
        self._boundaries: dict[int, Boundary] = {}
        self._begun = 0  # boundaries that the main thread has come to
        self._hub: threading.Thread | None = None
        self.hub: _Hub | None = None
        if rank == 0:
            self.hub = hub = _Hub(world, token, "127.0.0.1" if address == "127.0.0.1" else "")
            self._hub = threading.Thread(target=hub.serve, name="hpcai-hub", daemon=True)
            self._hub.start()
            store.set("hub", str(hub.port))
        port = int(store.get("hub"))
        self._line = socket.create_connection(("127.0.0.1" if rank == 0 else address, port), timeout=60)
        self._line.settimeout(None)
        _keep_alive(self._line)
        _send(self._line, token=token, rank=rank, name=self._name)
        self._ear = threading.Thread(target=self._listen, name="hpcai-watch", daemon=True)
        self._ear.start()

    def __enter__(self) -> "Watch":
        _joined.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _joined.remove(self)
        if error is None or isinstance(error, SystemExit | GeneratorExit):
            try:
                self._leave(error.code if isinstance(error, SystemExit) else None)
            except Exception as late:
                self._fail(late)
        else:
            self._fail(error)

    def _leave(self, code: Any) -> None:
        _release()
        self._leaving = True
        _send(self._line, left=code if isinstance(code, int) else bool(code))
        while self._hub is not None and self._hub.is_alive():
            self._hub.join(0.5)
        self._hang_up()

    def _fail(self, error: BaseException) -> NoReturn:
        ours = isinstance(error, HpcaiError)
        code = 2 if isinstance(error, ConfigError | MeshError | LaunchError) else 130 if isinstance(error, KeyboardInterrupt) else 1
        text = "".join(traceback.format_exception_only(error)).strip()
        if ours:
            text = f"{type(error).__name__}: {error}"
        quiet = ours or code == 130
        trace = error.__traceback__ and (error.__traceback__.tb_next or error.__traceback__)  # without start() itself
        whole = "".join(traceback.format_exception(type(error), error, trace))
        self._words = f"{self._name}: {text}" if quiet else f"{self._name} failed:\n{whole}"
        stop = self._declare(text, code, ours)
        if stop.get("alike"):
            if self._rank == 0:
                shout(text)
            self._hang_up()
            with suppress(RuntimeError):  # of a device that has failed: the cause is told
                _release()
            raise SystemExit(code)
        self._leave_failed(text, code, stop)

    def end(self, text: str, words: str) -> NoReturn:
        """Fail in a thread, while the main one cannot: ``words`` are printed once, and all ranks hear ``text``."""
        self._words = f"{self._name}: {words}"
        self._leave_failed(text, 1, self._declare(text, 1, ours=False))

    def be_spare(self) -> None:
        """The others can do without this rank from now on."""
        self._spare = True
        _send(self._line, spare=True)

    def next_boundary(self) -> Boundary:
        """One for the main thread, which comes to all of them in the same order on all ranks."""
        self._begun += 1
        return self._boundary(self._begun)

    def _boundary(self, number: int) -> Boundary:
        with self._lock:
            if number not in self._boundaries:
                self._boundaries[number] = Boundary(partial(_send, self._line, boundary=number), alone=False)
            return self._boundaries[number]

    def _declare(self, text: str, code: int, ours: bool) -> dict[str, Any]:
        """Tell the hub of a failure -> its word to stop; nothing where it does not answer."""
        with self._lock:
            self._failing = not self._stopping
        if self._stopping:
            time.sleep(2 * _LAST_RESORT)  # this is a consequence, and _stopped ends this process meanwhile
        _send(self._line, failed=text[:_LONGEST_TEXT], code=code, ours=ours)
        self._answered.wait(_PATIENCE)
        return self._stop or {}

    def _leave_failed(self, text: str, code: int, stop: dict[str, Any]) -> NoReturn:
        if not self._printed and stop.get("text") != text:  # it stands there once already
            shout(f"{self._name} failed as well: {text}" if stop else self._words)
        time.sleep(_LAST_WORDS if self._printed or not stop else _LAST_RESORT)
        _flush()
        self._abort(code)
        leave_now(code)

    def _listen(self) -> None:
        for message in _messages(self._line):
            if "print" in message:
                others = f"\n{message['print']} other ranks failed alike" if message["print"] else ""
                shout(self._words + others)
                self._printed = True
                _send(self._line, printed=True)
            elif "ask" in message:
                _send(self._line, doing=_doing[-1]()[:_LONGEST_DOING])
            elif "hold" in message:
                number = message["hold"]
                _send(self._line, boundary=number, passed=self._boundary(number).hold())
            elif "stop_at" in message:
                self._boundary(message["boundary"]).agreed(message["stop_at"], message["by"])
            elif "lost" in message:
                self.lost = message["lost"]
                self.losing.set()
                if self._spare:
                    leave_now(1)
                if self._rank == 0:
                    shout(f"{self.lost}; training goes on without evaluation")
            elif "stop" in message:
                return self._stopped(message)
        if not self._leaving:
            self._stopped({"stop": "the connection to rank 0 is lost", "code": 1, "dead": True})
        return None

    def _stopped(self, message: dict[str, Any]) -> None:
        with self._lock:
            if self._failing:
                self._stop = message
                self._answered.set()
                return
            self._stopping = True
        shout(f"{message['stop']}; this is {self._name}, stopping")
        began = time.monotonic()
        _say_last_words(message["stop"])
        time.sleep(0 if message["dead"] else max(0.0, began + _LAST_RESORT - time.monotonic()))
        leave_now(message["code"])

    def _hang_up(self) -> None:
        with suppress(OSError):  # the other end was faster
            self._line.shutdown(socket.SHUT_RDWR)
        self._ear.join()
        self._line.close()


class _Word(BaseModel):
    """What a rank may say to the hub."""

    model_config = ConfigDict(extra="forbid", strict=True)

    token: str = ""
    rank: int = -1
    name: str = Field("", max_length=300)
    left: bool | int | None = None
    spare: bool = False
    failed: str | None = Field(None, max_length=_LONGEST_TEXT)
    code: int = Field(1, ge=1, le=255)
    ours: bool = False
    printed: bool = False
    doing: str | None = Field(None, max_length=_LONGEST_DOING)
    boundary: int = Field(0, ge=0, le=PAST)
    asked: str | None = Field(None, max_length=_LONGEST_ASKED)
    passed: int | None = Field(None, ge=0, le=PAST)


@dataclass(eq=False)
class _Member:
    line: socket.socket
    rank: int = -1  # until it has shown the token
    name: str = ""
    left: bool = False
    spare: bool = False
    code: int | None = None  # its exit code, once it has left
    doing: str | None = None  # its answer, when it was asked
    rest: bytes = b""


@dataclass(eq=False)
class _Held:
    """A boundary at which all ranks are to stop: who asked, and how often each rank has passed, as far as it has answered."""

    by: str
    passed: dict[int, int] = field(default_factory=dict)
    told: bool = False


@dataclass(frozen=True)
class _Failure:
    member: _Member
    text: str
    code: int = 1
    ours: bool = False
    dead: bool = False


class _Hub:
    """Hears all ranks; ends when all have left, or when it has stopped them. It listens on ``interface``, "" for all of them."""

    def __init__(self, world: int, token: str, interface: str = "") -> None:
        self._world, self._token = world, token
        both = not interface and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        queue = min(world + _STRANGERS, 4096)  # where it is full a connection is tried again after seconds, at last after a minute
        self._door = socket.create_server((interface, 0), family=family, backlog=queue, dualstack_ipv6=both)
        self.port: int = self._door.getsockname()[1]
        self._members: list[_Member] = []
        self._strangers: list[_Member] = []
        self._failures: list[_Failure] = []
        self._held: dict[int, _Held] = {}
        self._lost = False

    def serve(self) -> None:
        try:
            with selectors.DefaultSelector() as ready:
                ready.register(self._door, selectors.EVENT_READ, None)
                self._attend(ready)
        finally:  # whatever happened, ranks that are still there notice the end
            for member in self._members + self._strangers:
                member.line.close()
            self._door.close()

    def _attend(self, ready: selectors.BaseSelector) -> None:
        decide_at: float | None = None
        while sum(member.left for member in self._members) < self._world:
            for key, _ in ready.select(None if decide_at is None else max(0.0, decide_at - time.monotonic())):
                if key.data is None:
                    line, _ = self._door.accept()
                    _keep_alive(line)
                    self._strangers.append(_Member(line))
                    ready.register(line, selectors.EVENT_READ, self._strangers[-1])
                    if len(self._strangers) > max(_STRANGERS, self._world):
                        ready.unregister(self._strangers[0].line)
                        self._strangers.pop(0).line.close()
                elif not self._hear(key.data):
                    ready.unregister(key.data.line)
                    if key.data in self._strangers:
                        self._strangers.remove(key.data)
                        key.data.line.close()
            self._do_without()
            self._say_where()
            if not self._failures:
                decide_at = None
                continue
            first, complete = self._failures[0], len(self._failures) == self._world
            wait = 0.0 if complete else _SETTLE_OURS if first.ours else _SETTLE
            decide_at = min(decide_at or float("inf"), time.monotonic() + wait)
            if any(failure.dead for failure in self._failures) or time.monotonic() >= decide_at:
                return self._stop_all()
        return None

    def _do_without(self) -> None:
        """Once a spare rank is killed, all of them count as having left, and what they say of it as its consequence."""
        killed = next((failure for failure in self._failures if failure.member.spare and failure.dead), None)
        if killed is not None and not self._lost:
            self._lost = True
            for member in self._members:
                member.left |= member.spare
                if member is not killed.member:
                    _send(member.line, lost=f"{killed.member.name} is lost: {killed.text}")
        if self._lost:
            self._failures = [failure for failure in self._failures if not failure.member.spare]

    def _say_where(self) -> None:
        """Tell all ranks at which pass they stop, once each has answered that is still there."""
        there = {member.rank for member in self._members if not member.left}
        for number, held in self._held.items():
            if not held.told and len(self._members) == self._world and there <= held.passed.keys():
                held.told = True
                for member in self._members:
                    _send(member.line, boundary=number, stop_at=max(held.passed.values(), default=0) + 1, by=held.by)

    def _hear(self, member: _Member) -> bool:
        """Take in what a rank says; False when its connection is closed, or it is none of ours."""
        try:
            data = member.line.recv(65536)
        except OSError:
            data = b""
        *lines, member.rest = (member.rest + data).split(b"\n")
        longest = _LONGEST_GREETING if member.rank < 0 else _LONGEST_WORD
        bounded = max(map(len, [*lines, member.rest])) <= longest
        heard = bool(data) and bounded and all(self._take(member, line) for line in lines)
        if not heard and member.rank >= 0 and not member.left and all(failure.member is not member for failure in self._failures):
            text = "it ended without a word: killed by a signal, by the scheduler or for want of memory"
            self._failures.append(_Failure(member, text, dead=True))
        return heard

    def _take(self, member: _Member, line: bytes) -> bool:
        """Whether a line is a word of ours, which then counts."""
        try:
            word = _Word.model_validate_json(line)
        except ValidationError:
            return False
        if member.rank < 0:
            known = hmac.compare_digest(word.token.encode(), self._token.encode())
            if not known or word.rank not in range(self._world) or any(other.rank == word.rank for other in self._members):
                return False
            member.rank, member.name = word.rank, word.name
            self._strangers.remove(member)
            self._members.append(member)
            for number in self._held:
                _send(member.line, hold=number)
        member.spare |= word.spare
        member.doing = word.doing if word.doing is not None else member.doing
        if word.asked is not None and word.boundary not in self._held:
            self._held[word.boundary] = _Held(f"{word.asked} on {member.name}")
            for other in self._members:
                _send(other.line, hold=word.boundary)
        if word.passed is not None and word.boundary in self._held:
            self._held[word.boundary].passed[member.rank] = word.passed
        if word.left is not None:
            member.left, member.code = True, word.left
        if word.failed is not None:
            self._failures.append(_Failure(member, word.failed, word.code, word.ours))
        return True

    def answers(self, patience: float) -> "dict[int, Answer]":
        """Asked from another thread than that which serves."""
        members = list(self._members)
        for member in members:
            member.doing = None
            _send(member.line, ask=True)
        until = time.monotonic() + patience
        while time.monotonic() < until and any(member.doing is None for member in members):
            time.sleep(0.02)
        return {member.rank: Answer(member.name, member.doing) for member in members}

    def _stop_all(self) -> None:
        first = next((failure for failure in self._failures if failure.dead), self._failures[0])
        alike = len(self._failures) == self._world and first.ours and len({failure.text for failure in self._failures}) == 1
        if not alike and not first.dead:
            first.member.line.settimeout(3)
            _send(first.member.line, print=sum(failure.text == first.text for failure in self._failures) - 1)
            self._hear(first.member)  # it has printed; only now may any rank leave, because launchers then end the rest
        text = f"{first.member.name} failed: {first.text}"
        early = [member for member in self._members if member.code]
        if early:
            text += f" ({early[0].name} had left with exit code {early[0].code})"
        for member in sorted(self._members, key=lambda member: -member.rank):  # this process, rank 0, last
            _send(member.line, stop=text, text=first.text, code=first.code, alike=alike, dead=first.dead)


def spare() -> None:
    """This rank is one that the others can do without: where it is killed from now on, they go on."""
    for watch in _joined:
        watch.be_spare()


def lost(patience: float = 0.0) -> str:
    """What is known of a spare rank that was killed, "" for none. Within ``patience`` seconds it may come to be known."""
    for watch in _joined:
        watch.losing.wait(patience)
        return watch.lost
    return ""


def boundary(ranks: int) -> Boundary:
    """The next boundary, at which all ``ranks`` of the job come to stop once one asks; all come to each in the same order.

    Where it has not been ``start`` that let several ranks meet, they cannot agree: one that asks raises LaunchError.
    """
    for watch in _joined if ranks > 1 else ():
        return watch.next_boundary()
    return Boundary(_unheard, alone=ranks == 1)


def _unheard(asked: str) -> NoReturn:
    raise LaunchError(f"{asked} asks this rank to stop, and no other rank hears of it; let them meet by hpcai.dist.start")


class Answer(NamedTuple):
    """A rank that has met the others: ``name`` tells its host, and ``doing`` what it does, None where it does not answer."""

    name: str
    doing: str | None


_doing: list[Callable[[], str]] = [lambda: ""]


def say_doing(tell: Callable[[], str]) -> None:
    """From now on this rank answers with ``tell()`` when rank 0 asks what it does."""
    _doing[:] = [tell]


def answers(patience: float) -> dict[int, Answer]:
    """What the ranks do that have met, asked on rank 0, for a program that takes too long; nothing where no job is under way.

    A rank does not answer within ``patience`` seconds where its process is stopped, or a long C call holds its interpreter; it
    does while it waits in a collective.
    """
    for watch in _joined:
        if watch.hub is not None:
            return watch.hub.answers(patience)
    return {}


def shout(text: str) -> None:
    """Write whole lines to stderr at once, from any thread, past Python's buffers and their locks. What would steer a terminal is
    replaced."""
    plain = "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text.rstrip("\n"))
    with suppress(OSError):  # stderr may be closed
        os.write(2, (plain + "\n").encode(errors="replace"))


def end_job(text: str, words: str) -> NoReturn:
    """End all ranks with exit code 1, from any thread of a process whose main thread is stuck."""
    for watch in _joined:
        watch.end(text, words)
    shout(f"error: {words}")
    leave_now(1)


def _say_last_words(reason: str) -> None:
    """A file system that hangs does not keep this process."""
    for speak in list(last_words):
        thread = threading.Thread(target=speak, args=(reason,), daemon=True)
        thread.start()
        thread.join(_LAST_RESORT)


def leave_now(code: int) -> NoReturn:
    """End this process from any thread, whatever the others do."""
    _flush()
    os._exit(code)


def _release() -> None:
    if torch_dist.is_initialized():
        for let_go in before_groups_end:
            let_go()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # NCCL lets go of a graph in a thread of its own
        torch_dist.destroy_process_group()
        _let_gloo_rest()


def _let_gloo_rest() -> None:
    """Wait until gloo's threads sleep, 20 ms as a rule.

    A thread that still releases the last collective's tensors while the interpreter ends aborts the process. Destroying the group
    joins its threads only when nothing, such as an Axis in a layer, holds it any more.
    """
    before: list[str] | None = None
    for _ in range(100):
        states = []
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):
                if "gloo_runloop" in (task / "comm").read_text():
                    states.append((task / "status").read_text())
        # A thread sleeps if it was not scheduled since the last look; one that waits for the interpreter lock wakes every 5 ms.
        now = [line for state in states for line in state.splitlines() if line.startswith(("State", "Pid", "voluntary_ctxt"))]
        if now == before and not any("R (running)" in line for line in now):
            return
        before = now
        time.sleep(0.02)


def _flush() -> None:
    """Flush what was printed, for a second at most: another thread may hold a stream for ever."""
    thread = threading.Thread(target=lambda: (sys.stdout.flush(), sys.stderr.flush()), daemon=True)
    thread.start()
    thread.join(1)


def _send(line: socket.socket, **message: Any) -> None:
    with suppress(OSError):  # the thread that reads here notices a closed connection
        line.sendall(json.dumps(message).encode() + b"\n")


def _messages(line: socket.socket) -> Iterator[dict[str, Any]]:
    rest = b""
    while True:
        try:
            data = line.recv(65536)
        except OSError:
            data = b""
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from map(json.loads, lines)


def _keep_alive(line: socket.socket) -> None:
    """Have a node that vanishes without closing its connections noticed after about two minutes."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
