"""A watchdog: if one rank fails, all ranks stop, and rank 0 prints the traceback of the first failure.

Every rank has one connection to a hub, a thread on rank 0. A failing rank sends its error; the connection of a killed rank closes.
The hub prints the first failure and stops all ranks. There is no polling, and no heartbeat that a long C call could delay by
holding the interpreter lock. A rank may request that all ranks stop after the same step (``next_step_boundary``).

A main thread inside a collective or a long computation cannot be interrupted, so its process is ended. A lost hub counts as a
failure of rank 0, which therefore leaves last. The hub listens on the loopback interface if all ranks share a node, and ignores
connections that have not sent the token of the job.

A long wait for other ranks is reported, and signals end it, also within a call in C++, which delays their handlers.
"""

import asyncio
import hmac
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as torch_dist

from hpcai.dist.host import format_ranges
from hpcai.dist.step_boundary import StepBoundary
from hpcai.errors import ConfigError, HpcaiError, LaunchError, MeshError, escape_controls
from hpcai.stop import REQUEUE, is_starting, receive_signal

# Delays and timeouts in seconds
_CAUSE_DELAY = 0.3  # a consequence on another rank ("connection closed by peer") may arrive before its cause
_REFUSAL_DELAY = 2.0  # for all ranks to report an HpcaiError, which is printed once if it is the same on all
_HUB_TIMEOUT = 8.0  # of a failing rank
_SIGNAL_TIMEOUT = 0.4  # of a rank that is ended by a signal, within a second
_ANSWER_TIMEOUT = 2.0  # of a rank that is asked where it is
_FIRST_EXIT_DELAY = 0.5  # from the stop message until the first failing rank ends the job with its exit code
_EXIT_DELAY = 2.0  # from that message until the other ranks exit, so that the launcher sees the cause first
_HANDSHAKE_TIMEOUT = 60.0  # until a connection has sent the token
FIRST_REPORT, NEXT_REPORT = 10.0, 60.0  # until the first report of a wait, and between the further ones
_MAX_MESSAGE = 1 << 18  # bytes
_MAX_REASON = 1 << 12  # characters of the reason of a failure
_MAX_UNAUTHENTICATED = 256  # simultaneous connections without a token, besides one for each rank

on_abort: list[Callable[[str], object]] = []
"""Called with the reason on a rank that is stopped because another failed, each for two seconds at most."""

before_destroy_process_group: list[Callable[[], object]] = []
"""Called before the process groups are destroyed, to release objects that reference them."""

_active: list["Watchdog"] = []


class Watchdog:
    """Context manager that stops all ranks of a job if one fails. A normal exit destroys the process groups.

    The exit code is 2 for wrong settings, mesh or launch, 130 for Ctrl-C, otherwise 1; SystemExit keeps its own. ``address``
    is that of rank 0, which publishes the port of the hub in ``store``. ``abort`` ends the job with an exit code, and ``token`` is
    the secret of the ranks.
    """

    def __init__(
        self, rank: int, world: int, address: str, store: torch_dist.Store, abort: Callable[[int], Any], token: str = "",
    ) -> None:  # fmt: skip
        self._rank, self._name = rank, f"rank {rank} on {socket.gethostname()}"
        self.store, self._abort = store, abort
        self._lock, self._answered, self._joined = threading.Lock(), threading.Event(), threading.Event()
        self._hub_answered = threading.Event()
        self._failing = self._stopping = self._leaving = False
        self._stop: dict[str, Any] = {}
        self._boundaries: dict[int, StepBoundary] = {}
        self._boundary_count = 0  # boundaries of the main thread so far
        self._hub: threading.Thread | None = None
        self.hub: _Hub | None = None
        if rank == 0:
            self.hub = hub = _Hub(world, token, "127.0.0.1" if address == "127.0.0.1" else "")
            self._hub = threading.Thread(target=hub.serve, name="hpcai-hub", daemon=True)
            self._hub.start()
            store.set("hub", str(hub.port))
        port = int(store.get("hub"))
        self._connection = socket.create_connection(("127.0.0.1" if rank == 0 else address, port), timeout=60)
        self._connection.settimeout(None)
        _keep_alive(self._connection)
        self._send = partial(_send, self._connection.sendall)
        self._send(token=token, rank=rank, name=self._name)
        self._listener = threading.Thread(target=self._listen, name="hpcai-watch", daemon=True)
        self._listener.start()

    def __enter__(self) -> "Watchdog":
        _active.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is not None and not isinstance(error, SystemExit | GeneratorExit):
                self._fail(error)
            if isinstance(error, SystemExit) and error.code == REQUEUE and is_starting():
                text = "a signal ended this job before training began"
                self.report_and_exit(text, text, REQUEUE, at_once=True)
            self._leave(error.code if isinstance(error, SystemExit) else None)
        except Exception as release_error:
            self._fail(release_error)
        finally:
            _active.remove(self)

    def wait_for_ranks(self, timeout: float) -> None:
        """Wait until all ranks are connected to the hub. Raises LaunchError after ``timeout`` seconds."""
        missing = self.hub.describe_missing if self.hub is not None else lambda: "ranks, which rank 0 names"
        with waiting_at(lambda: f"the rendezvous with {missing()}"):
            if not self._joined.wait(timeout):
                raise LaunchError(f"waited {timeout:.0f} s for {missing()}; start all ranks, or raise HPCAI_TIMEOUT")

    def hub_answers(self) -> bool:
        """Return whether rank 0 answers within two seconds."""
        self._hub_answered.clear()
        self._send(ping=True)
        return self._hub_answered.wait(_ANSWER_TIMEOUT)

    def _leave(self, code: Any) -> None:
        with waiting_at("the end", is_work=True):
            _destroy_process_groups()
            self._leaving = True
            self._send(left=code if isinstance(code, int) else int(bool(code)))
            while self._failing or (self._hub is not None and self._hub.is_alive()):  # failing: a signal ends this process
                time.sleep(0.02)
            self._disconnect()

    def _fail(self, error: BaseException) -> NoReturn:
        refused = isinstance(error, HpcaiError)
        code = 2 if isinstance(error, ConfigError | MeshError | LaunchError) else 1
        text = f"{type(error).__name__}: {error}" if refused else "".join(traceback.format_exception_only(error)).strip()
        if interrupted := isinstance(error, KeyboardInterrupt):
            code, text = getattr(error, "code", 130), "; ".join([f"interrupted by {error}", *getattr(error, "__notes__", ())])
        report = text
        if not refused and not interrupted:
            trace = error.__traceback__ and (error.__traceback__.tb_next or error.__traceback__)  # without start() itself
            report = "".join(traceback.format_exception(type(error), error, trace))
        self.report_and_exit(text, report, code, refused, at_once=interrupted and is_starting())

    def report_and_exit(
        self, text: str, report: str, code: int = 1, refused: bool = False, at_once: bool = False,
    ) -> NoReturn:  # fmt: skip
        """Report a failure to the hub, and exit according to its answer. ``report`` is printed once, and all ranks get ``text``.
        ``at_once``: A signal ends the job; no rank waits for the reports of others."""
        text, report = text[:_MAX_REASON], report[-_MAX_MESSAGE // 8 :]  # JSON has up to six bytes for a character
        with self._lock:
            self._failing = not self._stopping
        if self._stopping:
            time.sleep(2 * _EXIT_DELAY)  # this failure is a consequence: _on_stop ends this process meanwhile
        timeout = _SIGNAL_TIMEOUT if at_once else _HUB_TIMEOUT
        self._send(failed=text, report=report, code=code, refused=refused, at_once=at_once)
        self._answered.wait(timeout)
        if self._stop.get("on_all"):
            self._disconnect()
            with suppress(RuntimeError):  # of a failed device; the cause is printed already
                _destroy_process_groups()
            raise SystemExit(code)
        first = self._stop.get("first", self._rank) == self._rank
        if not self._stop:  # the hub does not answer
            report_failure(_format_failure(self._name, report))
        elif self._stop["text"] != text:
            report_failure(f"{self._name} failed as well: {text}")
        time.sleep(min(timeout, _FIRST_EXIT_DELAY if first else _EXIT_DELAY))
        _flush()
        self._abort(code)
        exit_now(code)

    def next_boundary(self) -> StepBoundary:
        """Return a new boundary of the main thread. All ranks create them in the same order."""
        self._boundary_count += 1
        return self._boundary(self._boundary_count)

    def _boundary(self, number: int) -> StepBoundary:
        with self._lock:
            return self._boundaries.setdefault(number, StepBoundary(partial(self._send, boundary=number), alone=False))

    def _listen(self) -> None:
        for message in _read_messages(self._connection):
            if "joined" in message:
                self._joined.set()
            elif "pong" in message:
                self._hub_answered.set()
            elif "query" in message:
                self._send(status=_status[-1]())
            elif "hold" in message:
                number = message["hold"]
                self._send(boundary=number, steps=self._boundary(number).hold())
            elif "stop_at" in message:
                self._boundary(message["boundary"]).set_stop(message["stop_at"], message["reason"])
            elif "stop" in message:
                return self._on_stop(message)
        if not self._leaving:
            report_failure(f"the connection to rank 0 is lost; this is {self._name}, stopping")
            text = "the connection to rank 0 is lost"
            self._on_stop({"stop": text, "text": text, "code": 1, "first": 0, "dead": True})
        return None

    def _on_stop(self, message: dict[str, Any]) -> None:
        with self._lock:
            if self._failing:
                self._stop = message
                self._answered.set()
                return
            self._stopping = True
        start_time = time.monotonic()
        for callback in list(on_abort):
            run_with_timeout(_EXIT_DELAY, partial(callback, message["stop"]))
        time.sleep(0 if message["dead"] else max(0.0, start_time + _EXIT_DELAY - time.monotonic()))
        exit_now(message["code"])

    def _disconnect(self) -> None:
        with suppress(OSError):  # closed by the other end
            self._connection.shutdown(socket.SHUT_RDWR)
        self._listener.join()
        self._connection.close()


@dataclass(eq=False)
class Member:
    """A rank that has sent the token; ``name`` contains its host."""

    rank: int
    name: str
    send: Callable[..., None]
    exit_code: int | None = None
    status: str | None = None  # the answer to the last query, if there is one


@dataclass(eq=False)
class _StopRequest:
    """A boundary at which all ranks will stop: the reason, and the steps of the ranks that have answered."""

    reason: str
    steps: dict[int, int] = field(default_factory=dict)
    announced: bool = False


@dataclass(frozen=True)
class _Failure:
    member: Member
    text: str
    report: str
    code: int = 1
    refused: bool = False
    dead: bool = False


class _Hub:
    """The server of all watchdogs, until all ranks have left or are stopped. It listens on ``interface``, or on all if it is ""."""

    def __init__(self, world: int, token: str, interface: str = "") -> None:
        self._world, self._token = world, token
        dual_stack = not interface and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual_stack else socket.AF_INET
        self._backlog = min(world + _MAX_UNAUTHENTICATED, 4096)  # if it is full, a connection is retried after seconds
        self._socket = socket.create_server((interface, 0), family=family, backlog=self._backlog, dualstack_ipv6=dual_stack)
        self.port: int = self._socket.getsockname()[1]
        self._members: dict[int, Member] = {}
        self._failures: list[_Failure] = []
        self._stop_requests: dict[int, _StopRequest] = {}
        self._unauthenticated = 0
        self.loop = asyncio.new_event_loop()
        self._done = asyncio.Event()

    def serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:  # closes all connections, which stops the ranks
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._serve_connection, sock=self._socket, limit=_MAX_MESSAGE, backlog=self._backlog)
        await self._done.wait()
        server.close()

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _keep_alive(writer.get_extra_info("socket"))
        try:
            if (member := await self._authenticate(reader, writer)) is None:
                return
            with suppress(OSError, ValueError, LookupError, TypeError):  # it closes, or the message is malformed
                while line := await reader.readline():
                    self._process(member, json.loads(line))
            if member.exit_code is None and all(failure.member is not member for failure in self._failures):
                text = "its process ended without a report: killed by a signal, by the scheduler or because memory ran out"
                self._record_failure(_Failure(member, text, f"{member.name} failed: {text}", dead=True))
        except asyncio.CancelledError:  # the hub has ended; asyncio of Python 3.11 would print it
            pass
        finally:
            writer.close()

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Member | None:
        """Return the rank of a connection, or None without the token."""
        self._unauthenticated += 1
        try:
            if self._unauthenticated > self._world + _MAX_UNAUTHENTICATED:
                return None
            message = json.loads(await asyncio.wait_for(reader.readline(), _HANDSHAKE_TIMEOUT))
            rank, name = message["rank"], str(message["name"])
            authentic = hmac.compare_digest(message["token"].encode(), self._token.encode())
            if not authentic or type(rank) is not int or rank not in range(self._world) or rank in self._members:
                return None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, TimeoutError):
            return None
        finally:
            self._unauthenticated -= 1
        member = self._members[rank] = Member(rank, name, partial(_send, writer.write))
        for number in self._stop_requests:
            member.send(hold=number)
        for other in self._members.values() if len(self._members) == self._world else ():
            other.send(joined=True)
        return member

    def describe_missing(self) -> str:
        """Return the number and the ranks that have not connected yet."""
        missing = set(range(self._world)).difference(list(self._members))
        return f"{len(missing)} of {self._world} ranks: {format_ranges(missing)}"

    def _process(self, member: Member, message: dict[str, Any]) -> None:
        if "failed" in message:
            report = _format_failure(member.name, message["report"])
            code, at_once = message["code"] or 1, message.get("at_once", False)
            self._record_failure(_Failure(member, message["failed"], report, code, message["refused"], dead=at_once))
        elif "ping" in message:
            member.send(pong=True)
        elif "status" in message:
            member.status = message["status"]
        elif "request" in message and message["boundary"] not in self._stop_requests:
            self._stop_requests[message["boundary"]] = _StopRequest(f"{message['request']} on {member.name}")
            for other in self._members.values():
                other.send(hold=message["boundary"])
        elif "steps" in message:
            self._stop_requests[message["boundary"]].steps[member.rank] = message["steps"]
        elif "left" in message:
            member.exit_code = message["left"]
        # Each boundary gets its step once all remaining ranks have answered.
        remaining = {member.rank for member in self._members.values() if member.exit_code is None}
        for number, request in self._stop_requests.items():
            if not request.announced and len(self._members) == self._world and remaining <= request.steps.keys():
                request.announced = True
                for other in self._members.values():
                    other.send(boundary=number, stop_at=max(request.steps.values(), default=0) + 1, reason=request.reason)
        if sum(member.exit_code is not None for member in self._members.values()) == self._world:
            self._done.set()

    async def query_status(self, timeout: float) -> dict[int, Member]:
        members = [member for member in self._members.values() if member.exit_code is None]
        for member in members:
            member.status = None
            member.send(query=True)
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and any(member.status is None for member in members):
            await asyncio.sleep(0.02)
        return {member.rank: member for member in members}

    def _record_failure(self, failure: _Failure) -> None:
        self._failures.append(failure)
        final = failure.dead or len(self._failures) == self._world or len(self._members) < self._world
        self.loop.call_later(0 if final else _REFUSAL_DELAY if self._failures[0].refused else _CAUSE_DELAY, self._stop_all)

    def _stop_all(self) -> None:
        if self._done.is_set():
            return
        first = next((failure for failure in self._failures if failure.dead), self._failures[0])
        same = sum(failure.text == first.text for failure in self._failures)
        on_all = same == self._world and first.refused
        report_failure(first.text if on_all else first.report + (f"\n{same - 1} other ranks failed alike" if same > 1 else ""))
        text = f"{first.member.name} failed: {first.text}"
        if left := [member for member in self._members.values() if member.exit_code]:
            text += f" ({left[0].name} had left with exit code {left[0].exit_code})"
        for member in sorted(self._members.values(), key=lambda member: -member.rank):  # rank 0, this process, last
            member.send(stop=text, text=first.text, code=first.code, first=first.member.rank, on_all=on_all, dead=first.dead)
        self._done.set()


def _format_failure(name: str, report: str) -> str:
    return f"{name} failed:\n{report}" if "\n" in report.strip() else f"{name}: {report}"


def next_step_boundary(ranks: int) -> StepBoundary:
    """Return a new boundary, at which all ``ranks`` of the job can stop together. All ranks create them in the same order.

    Without ``hpcai.dist.start`` several ranks have no watchdog: a request then raises LaunchError.
    """
    for watchdog in _active if ranks > 1 else ():
        return watchdog.next_boundary()
    return StepBoundary(_reject_request, alone=ranks == 1)


def _reject_request(request: str) -> NoReturn:
    raise LaunchError(f"{request} stops this rank, but not the others without a watchdog; initialize by hpcai.dist.start")


# ---- waits


class _Heartbeat:
    """Counts of finished steps and batches of evaluations. It is global, since a process has one run at a time."""

    beats = 0
    attended = False  # a person is at the terminal: no wait is reported, and the main thread handles signals
    pauses = 0  # above 0 while this rank waits for ranks with watchdogs of their own


HEARTBEAT = _Heartbeat()


class _Wait:
    """A wait of the main thread; ``lost``: whether a rank does not answer."""

    def __init__(self, place: Callable[[], str], is_work: bool) -> None:
        self.place, self.is_work, self.signal = place, is_work, 0
        self.restart()

    def restart(self) -> None:
        self.start, self.beats, self.reports, self.lost = time.monotonic(), HEARTBEAT.beats, 0, False


_waits: list[_Wait] = []  # of the main thread, the innermost last
_monitors: list[threading.Thread] = []


@contextmanager
def waiting_at(place: str | Callable[[], str], is_work: bool = False) -> Iterator[None]:
    """Context manager around calls of the main thread that wait for others. After ten seconds without a step a thread reports the
    wait. It ends the job by a signal that the main thread cannot handle: before training begins at once, later if it has reported.

    ``place``: The name of the wait; without one only a rank that does not answer is reported, or a long start. ``is_work``: The
    ranks may be at work, which a signal should not interrupt: it ends the wait only if a rank does not answer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if not (_monitors and _monitors[-1].is_alive()):  # it does not survive a fork
        _monitors[:] = [threading.Thread(target=_monitor, name="hpcai-waits", daemon=True)]
        _monitors[-1].start()
    _waits.append(_Wait(place if callable(place) else lambda: place, is_work))
    try:
        yield
    finally:
        _waits.pop()
        for outer in _waits[-1:]:
            outer.restart()


def _monitor() -> None:
    wait: _Wait | None = None
    while True:
        number = receive_signal(0.1 if wait and wait.signal else min(0.5, FIRST_REPORT / 4))
        wait, now = next(iter(_waits[-1:]), None), time.monotonic()
        if wait is None or HEARTBEAT.attended:
            continue
        if wait.signal and (is_starting() or (wait.lost if wait.is_work else wait.reports)):
            place, code = wait.place(), 130 if wait.signal == signal.SIGINT else REQUEUE
            text = f"{signal.Signals(wait.signal).name} ended the wait{place and f' at {place}'}"
            abort_job(text, text, code)
        wait.signal = wait.signal or number
        if wait.beats != HEARTBEAT.beats:
            wait.restart()
        elif now - wait.start >= FIRST_REPORT + NEXT_REPORT * wait.reports:
            wait.reports += 1
            with suppress(RuntimeError, TimeoutError):  # the hub has ended
                wait.lost = report_wait(now - wait.start)


def describe_main_thread() -> str:
    """Return the named wait of the main thread, or its location."""
    place = _waits[-1].place() if _waits else ""
    return f"at {place}" if place else f"in {location(sys._current_frames()[threading.main_thread().ident or 0])}"


def location(frame: FrameType) -> str:
    """Return the innermost function of a stack, and the innermost one of this project that called it."""
    stack = traceback.extract_stack(frame)[::-1]
    texts = [f"{f.name} ({'/'.join(Path(f.filename).parts[-3:])}:{f.lineno}: {f.line})" for f in stack]
    foreign = ("site-packages", "dist-packages", os.path.dirname(threading.__file__))
    ours = [text for f, text in zip(stack[1:], texts[1:]) if not any(place in f.filename for place in foreign)]
    return ", called by ".join([texts[0], *ours[:1]])


_status: list[Callable[[], str]] = [describe_main_thread]


def set_status(function: Callable[[], str]) -> None:
    """Set the function that returns the status of this rank for ``query_status``."""
    _status[:] = [function]


def query_status(timeout: float) -> dict[int, Member]:
    """Return all connected ranks with their ``status``, on rank 0; empty on other ranks and outside of a job.

    A rank answers while it waits in a collective. It does not answer within ``timeout`` seconds if its process is stopped, or if
    a long C call holds its interpreter lock.
    """
    for hub in [watchdog.hub for watchdog in _active if watchdog.hub is not None]:
        return asyncio.run_coroutine_threadsafe(hub.query_status(timeout), hub.loop).result(2 * timeout)
    return {}


def report_wait(seconds: float) -> bool:
    """Report a wait of the main thread: rank 0 the places of all ranks, others if it does not answer. Return whether a rank does
    not answer."""
    places: dict[str, list[int]] = {}
    for rank, member in query_status(_ANSWER_TIMEOUT).items():
        places.setdefault(member.status or _NO_ANSWER, []).append(rank)
    if not places:
        if _active and _active[0].hub_answers():
            return False
        places = {describe_main_thread(): []} | ({_NO_ANSWER: [0]} if _active else {})
    if _NO_ANSWER in places or is_starting() or any(place.startswith("at ") for place in places):
        groups = sorted(places.items(), key=lambda group: (group[0] != _NO_ANSWER, len(group[1])))
        texts = (f"rank{'s' * (len(ranks) > 1)} {format_ranges(ranks)} {place}" if ranks else place for place, ranks in groups)
        report_failure(f"waiting since {seconds:.0f} s: {'; '.join(texts)}")
    return _NO_ANSWER in places


_NO_ANSWER = "does not answer (is it stopped, or in a long call of C++?)"


def report_failure(text: str) -> None:
    """Write whole lines to stderr at once, from any thread, without Python's buffers and locks; control characters are escaped."""
    with suppress(OSError):  # stderr may be closed
        os.write(2, (escape_controls(text.rstrip("\n")) + "\n").encode(errors="replace"))


def abort_job(text: str, report: str, code: int = 1) -> NoReturn:
    """End all ranks with an exit code, from any thread, while the main thread is stuck."""
    for watchdog in _active:
        watchdog.report_and_exit(text, report, code, at_once=code != 1)
    report_failure(f"error: {report}")
    exit_now(code)


def run_with_timeout(seconds: float, function: Callable[[], object]) -> None:
    """Call ``function`` in a thread, and wait ``seconds`` at most: a file system may hang, or a thread hold a stream."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)


def exit_now(code: int) -> NoReturn:
    """End this process, from any thread."""
    _flush()
    os._exit(code)


def _destroy_process_groups() -> None:
    if torch_dist.is_initialized():
        for callback in before_destroy_process_group:
            callback()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # NCCL releases a graph in a thread of its own
        torch_dist.destroy_process_group()
        _wait_for_gloo_threads()


def _wait_for_gloo_threads() -> None:
    """Wait until gloo's threads sleep, usually 20 ms.

    A thread that still releases tensors of the last collective while the interpreter ends aborts the process. Destroying a group
    joins its threads only if nothing, such as an Axis in a layer, references it.
    """
    before: list[str] | None = None
    for _ in range(100):
        states = []
        for task in Path("/proc/self/task").glob("*"):
            with suppress(OSError):
                if "gloo_runloop" in (task / "comm").read_text():
                    states.append((task / "status").read_text())
        # A thread sleeps if it was not scheduled since the last check. One that waits for the interpreter lock wakes every 5 ms.
        now = [line for state in states for line in state.splitlines() if line.startswith(("State", "Pid", "voluntary_ctxt"))]
        if now == before and not any("R (running)" in line for line in now):
            return
        before = now
        time.sleep(0.02)


def _flush() -> None:
    run_with_timeout(1, lambda: (sys.stdout.flush(), sys.stderr.flush()))


def _send(write: Callable[[bytes], object], **message: Any) -> None:
    with suppress(OSError):  # the reading thread notices a closed connection
        write(json.dumps(message).encode() + b"\n")


def _read_messages(connection: socket.socket) -> Iterator[dict[str, Any]]:
    with suppress(OSError), connection.makefile("rb") as lines:
        yield from (json.loads(line) for line in lines if line.endswith(b"\n"))  # the last one may be incomplete


def _keep_alive(connection: socket.socket) -> None:
    """Detect after about two minutes a node that vanishes without closing its connections."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
