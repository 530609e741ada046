"""When one rank fails, all ranks stop, and rank 0 prints the traceback of the rank that failed first.

Every rank keeps one connection to a hub, a thread on rank 0. A rank that fails says why; a rank that is killed says nothing, but
its connection closes. The hub prints the first failure and tells all ranks to stop. No rank polls, and no heartbeat is missed while
a long C call holds the interpreter.

A rank may ask that all stop at the same place (``boundary``): the hub hears how far each has come and says where.

A rank whose main thread is inside a collective or a long computation cannot be asked to leave, so it is ended where it is.
Losing the hub counts as a failure of rank 0; rank 0 therefore leaves last.

The hub listens on the loopback interface where all ranks share a node. It hears a connection only once that has shown the token of
the job.
"""

import asyncio
import hmac
import json
import os
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

from hpcai.dist.boundary import Boundary
from hpcai.errors import ConfigError, HpcaiError, LaunchError, MeshError

# All in seconds
_SETTLE = 0.3  # in which a consequence on another rank ("connection closed by peer") may arrive before its cause
_SETTLE_OURS = 2.0  # for all ranks to report a refusal, which is mostly the same on all and is then printed once
_PATIENCE = 8.0  # that a failing rank waits for the hub
_LAST_WORDS = 0.5  # from the word to stop until the rank that failed first ends the job with its exit code
_LAST_RESORT = 2.0  # from that word until the other ranks end by themselves, so that the launcher sees the cause first
_GREETING = 60.0  # for a connection to show the token
_LONGEST_LINE = 1 << 18  # bytes, of a message
_LONGEST_TEXT = 1 << 12  # letters, of the reason for a failure
_STRANGERS = 256  # connections without a token that are held at a time, beside one for each rank

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
        self._failing = self._stopping = self._leaving = False
        self._stop: dict[str, Any] = {}
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
        self._say = partial(_send, self._line.sendall)
        self._say(token=token, rank=rank, name=self._name)
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
        self._say(left=code if isinstance(code, int) else int(bool(code)))
        while self._hub is not None and self._hub.is_alive():
            self._hub.join(0.5)
        self._hang_up()

    def _fail(self, error: BaseException) -> NoReturn:
        ours = isinstance(error, HpcaiError)
        code = 2 if isinstance(error, ConfigError | MeshError | LaunchError) else 130 if isinstance(error, KeyboardInterrupt) else 1
        text = f"{type(error).__name__}: {error}" if ours else "".join(traceback.format_exception_only(error)).strip()
        words = text
        if not ours and code != 130:
            trace = error.__traceback__ and (error.__traceback__.tb_next or error.__traceback__)  # without start() itself
            words = "".join(traceback.format_exception(type(error), error, trace))
        self._end(text, words, code, ours)

    def end(self, text: str, words: str) -> NoReturn:
        """Fail in a thread, while the main one cannot: ``words`` are printed once, and all ranks hear ``text``."""
        self._end(text, words, 1, ours=False)

    def _end(self, text: str, words: str, code: int, ours: bool) -> NoReturn:
        """Tell the hub of a failure, and leave as it says."""
        text, words = text[:_LONGEST_TEXT], words[-_LONGEST_LINE // 8 :]  # JSON takes up to six bytes for a letter
        with self._lock:
            self._failing = not self._stopping
        if self._stopping:
            time.sleep(2 * _LAST_RESORT)  # this is a consequence, and _stopped ends this process meanwhile
        self._say(failed=text, words=words, code=code, ours=ours)
        self._answered.wait(_PATIENCE)
        if self._stop.get("alike"):
            self._hang_up()
            with suppress(RuntimeError):  # of a device that has failed: the cause is told
                _release()
            raise SystemExit(code)
        first = self._stop.get("first", self._rank) == self._rank
        if not self._stop:  # the hub does not answer
            shout(_printed(self._name, words))
        elif self._stop["text"] != text:
            shout(f"{self._name} failed as well: {text}")
        time.sleep(_LAST_WORDS if first else _LAST_RESORT)
        _flush()
        self._abort(code)
        leave_now(code)

    def next_boundary(self) -> Boundary:
        """One for the main thread, which comes to all of them in the same order on all ranks."""
        self._begun += 1
        return self._boundary(self._begun)

    def _boundary(self, number: int) -> Boundary:
        with self._lock:
            if number not in self._boundaries:
                self._boundaries[number] = Boundary(partial(self._say, boundary=number), alone=False)
            return self._boundaries[number]

    def _listen(self) -> None:
        for message in _messages(self._line):
            if "ask" in message:
                self._say(doing=_doing[-1]())
            elif "hold" in message:
                number = message["hold"]
                self._say(boundary=number, passed=self._boundary(number).hold())
            elif "stop_at" in message:
                self._boundary(message["boundary"]).agreed(message["stop_at"], message["by"])
            elif "stop" in message:
                return self._stopped(message)
        if not self._leaving:
            shout(f"the connection to rank 0 is lost; this is {self._name}, stopping")
            text = "the connection to rank 0 is lost"
            self._stopped({"stop": text, "text": text, "code": 1, "first": 0, "dead": True})
        return None

    def _stopped(self, message: dict[str, Any]) -> None:
        with self._lock:
            if self._failing:
                self._stop = message
                self._answered.set()
                return
            self._stopping = True
        began = time.monotonic()
        for speak in list(last_words):
            within(_LAST_RESORT, partial(speak, message["stop"]))
        time.sleep(0 if message["dead"] else max(0.0, began + _LAST_RESORT - time.monotonic()))
        leave_now(message["code"])

    def _hang_up(self) -> None:
        with suppress(OSError):  # the other end was faster
            self._line.shutdown(socket.SHUT_RDWR)
        self._ear.join()
        self._line.close()


@dataclass(eq=False)
class _Member:
    """A rank that has shown the token."""

    rank: int
    name: str
    say: Callable[..., None]
    left: int | None = None  # its exit code
    doing: str | None = None  # its answer, when it was asked


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
    words: str
    code: int = 1
    ours: bool = False
    dead: bool = False


class _Hub:
    """Hears all ranks until all have left, or until it has stopped them. It listens on ``interface``, "" for all of them."""

    def __init__(self, world: int, token: str, interface: str = "") -> None:
        self._world, self._token = world, token
        both = not interface and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._queue = min(world + _STRANGERS, 4096)  # where it is full a connection is tried again after seconds
        self._door = socket.create_server((interface, 0), family=family, backlog=self._queue, dualstack_ipv6=both)
        self.port: int = self._door.getsockname()[1]
        self._members: dict[int, _Member] = {}
        self._failures: list[_Failure] = []
        self._held: dict[int, _Held] = {}
        self._strangers = 0
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()

    def serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # it ends all connections, which the ranks notice
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._hear, sock=self._door, limit=_LONGEST_LINE, backlog=self._queue)
        await self._over.wait()
        server.close()

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hear one connection from its greeting to its end."""
        _keep_alive(writer.get_extra_info("socket"))
        try:
            if (member := await self._greeted(reader, writer)) is None:
                return
            with suppress(OSError, ValueError, LookupError, TypeError):  # it ends, or says what no rank of ours does
                while line := await reader.readline():
                    self._take(member, json.loads(line))
            if member.left is None and all(failure.member is not member for failure in self._failures):
                text = "it ended without a word: killed by a signal, by the scheduler or for want of memory"
                self._failed(_Failure(member, text, f"{member.name} failed: {text}", dead=True))
        except asyncio.CancelledError:  # the hub has ended; asyncio of Python 3.11 would print it
            pass
        finally:
            writer.close()

    async def _greeted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Member | None:
        """The rank that a connection is of; None where it does not show the token."""
        self._strangers += 1
        try:
            if self._strangers > self._world + _STRANGERS:
                return None
            told = json.loads(await asyncio.wait_for(reader.readline(), _GREETING))
            rank, name = told["rank"], str(told["name"])
            known = hmac.compare_digest(told["token"].encode(), self._token.encode())
            if not known or type(rank) is not int or rank not in range(self._world) or rank in self._members:
                return None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, TimeoutError):
            return None
        finally:
            self._strangers -= 1
        member = self._members[rank] = _Member(rank, name, partial(_send, writer.write))
        for number in self._held:
            member.say(hold=number)
        return member

    def _take(self, member: _Member, word: dict[str, Any]) -> None:
        if "failed" in word:
            words = _printed(member.name, word["words"])
            self._failed(_Failure(member, word["failed"], words, word["code"] or 1, word["ours"]))
        elif "doing" in word:
            member.doing = word["doing"]
        elif "asked" in word and word["boundary"] not in self._held:
            self._held[word["boundary"]] = _Held(f"{word['asked']} on {member.name}")
            for other in self._members.values():
                other.say(hold=word["boundary"])
        elif "passed" in word:
            self._held[word["boundary"]].passed[member.rank] = word["passed"]
        elif "left" in word:
            member.left = word["left"]
        self._say_where()
        if sum(member.left is not None for member in self._members.values()) == self._world:
            self._over.set()

    def _say_where(self) -> None:
        """Tell all ranks at which pass they stop, once each has answered that is still there."""
        there = {member.rank for member in self._members.values() if member.left is None}
        for number, held in self._held.items():
            if not held.told and len(self._members) == self._world and there <= held.passed.keys():
                held.told = True
                for member in self._members.values():
                    member.say(boundary=number, stop_at=max(held.passed.values(), default=0) + 1, by=held.by)

    async def answers(self, patience: float) -> "dict[int, Answer]":
        members = list(self._members.values())
        for member in members:
            member.doing = None
            member.say(ask=True)
        until = time.monotonic() + patience
        while time.monotonic() < until and any(member.doing is None for member in members):
            await asyncio.sleep(0.02)
        return {member.rank: Answer(member.name, member.doing) for member in members}

    def asked(self, patience: float) -> "dict[int, Answer]":
        """``answers``, from another thread than that of the hub."""
        return asyncio.run_coroutine_threadsafe(self.answers(patience), self._loop).result(2 * patience)

    def _failed(self, failure: _Failure) -> None:
        self._failures.append(failure)
        decided = failure.dead or len(self._failures) == self._world
        self._loop.call_later(0 if decided else _SETTLE_OURS if self._failures[0].ours else _SETTLE, self._stop_all)

    def _stop_all(self) -> None:
        if self._over.is_set():
            return
        first = next((failure for failure in self._failures if failure.dead), self._failures[0])
        same = sum(failure.text == first.text for failure in self._failures)
        alike = same == self._world and first.ours
        shout(first.text if alike else first.words + (f"\n{same - 1} other ranks failed alike" if same > 1 else ""))
        text = f"{first.member.name} failed: {first.text}"
        if early := [member for member in self._members.values() if member.left]:
            text += f" ({early[0].name} had left with exit code {early[0].left})"
        for member in sorted(self._members.values(), key=lambda member: -member.rank):  # this process, rank 0, last
            member.say(stop=text, text=first.text, code=first.code, first=first.member.rank, alike=alike, dead=first.dead)
        self._over.set()


def _printed(name: str, words: str) -> str:
    """Return the text that is printed about a failure."""
    return f"{name} failed:\n{words}" if "\n" in words.strip() else f"{name}: {words}"


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
            return watch.hub.asked(patience)
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


def within(seconds: float, act: Callable[[], object]) -> None:
    """Wait for ``act()`` in another thread, but not for ever: a file system may hang, or a thread hold a stream."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)


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
    within(1, lambda: (sys.stdout.flush(), sys.stderr.flush()))


def _send(write: Callable[[bytes], object], **message: Any) -> None:
    with suppress(OSError):  # the thread that reads here notices a closed connection
        write(json.dumps(message).encode() + b"\n")


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
