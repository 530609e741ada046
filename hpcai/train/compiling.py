"""torch.compile for models: in place, counted, and kept on disk from one job to the next.

Compiled code is kept as one archive per key of what Inductor and Triton leave on a node's own disk. torch's own portable form
(``torch.compiler.save_cache_artifacts``) is not used: it lacks the C++ kernels' binaries, which g++ would build again.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import stat
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from hpcai.dist.mesh import Mesh
from hpcai.errors import ConfigError
from hpcai.parallel.pipeline_stages import StageOutput
from hpcai.settings import StepConfig

logger = logging.getLogger(__name__)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of ``model``: children of an nn.ModuleList or nn.Sequential where two or more have the same class.

    The outermost ones count; torch's own layers do not, nor does a list or stage that holds blocks itself. A block whose like are
    on other stages of a pipeline is repeated too.
    """
    return list(dict.fromkeys(_iterate_blocks(model)))


def _iterate_blocks(module: nn.Module) -> Iterator[nn.Module]:
    kinds = Counter(type(child) for child in module.children())
    for child in module.children():
        inner = list(_iterate_blocks(child))
        bases = [base for base in type(child).__mro__ if base is not nn.Module]
        layer = not list(child.children()) and any(base.__module__.startswith("torch.nn.") for base in bases)
        stage = isinstance(child, nn.ModuleList | nn.ModuleDict) or (inner and isinstance(child, nn.Sequential))
        repeated = kinds[type(child)] + kinds[StageOutput] > 1 and not isinstance(child, StageOutput)
        if isinstance(module, nn.ModuleList | nn.Sequential) and repeated and not layer and not stage:
            yield child
        else:
            yield from inner


def compile_model(
    model: nn.Module, mode: Literal["none", "blocks", "whole"], dynamic: bool | None = False, backend: str = "inductor"
) -> int:
    """Have ``model`` compiled at its next call, in place, so that checkpoint keys stay; returns how many modules were chosen.

    ``blocks`` compiles each repeated block: torch compiles blocks that are alike once. Raises ConfigError when there is none.
    """
    if mode == "none":
        return 0
    modules = [model] if mode == "whole" else repeated_blocks(model)
    if not modules:
        raise ConfigError(f"compile: blocks, but {type(model).__name__} repeats none in a list or sequence; set compile: whole")
    # Blocks of one class share one code object, whose versions torch counts: by size, training or not, gradients or not. Past
    # its limit (8) it would run them uncompiled.
    kinds = {(type(block), tuple(tuple(p.shape) for p in block.parameters())) for block in modules}
    most = max(Counter(kind for kind, _ in kinds).values())
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 8 * most)
    options = {"options": {"triton.cudagraphs": False}} if backend == "inductor" else {}  # a step is captured as a whole
    for module in modules:
        # torch passes over a call that never leaves its own files, such as that of layers in an nn.Sequential, and says nothing.
        of_torch = all(type(part).__module__.startswith("torch.") for part in module.modules())
        call = _call_outside_torch(module) if of_torch else module._call_impl
        module._compiled_call_impl = torch.compile(call, dynamic=dynamic, fullgraph=False, backend=backend, **options)  # type: ignore[call-overload]
    return len(modules)


def _call_outside_torch(module: nn.Module) -> Callable[..., Any]:
    def call(*inputs: Any, **words: Any) -> Any:
        return module._call_impl(*inputs, **words)

    return call


class CompileCounts:
    """What torch.compile did in this process since this was made. Made after the first steps, it counts what should not be."""

    def __init__(self) -> None:
        self._since, self._start = time.time(), _dynamo_counters()

    def read(self) -> dict[str, Any]:
        """The counts: graphs, seconds (with the backward graphs), graph_breaks, recompiles (of a frame, also for other sizes of a
        block), given_up (frames past the limit of versions, which run uncompiled), found and made (Inductor's code, forward and
        backward, that an earlier job, another process of the node or a graph like it had left, or nobody), and why: the most
        frequent reasons by count."""
        now = {name: counter - self._start[name] for name, counter in _dynamo_counters().items()}  # a Counter keeps positive counts
        before, versions = self._start["versions"], now["versions"]
        return {
            "graphs": int(now["stats"]["unique_graphs"]),
            "seconds": round(sum(now["seconds"].values()), 3),
            "graph_breaks": sum(now["breaks"].values()),
            "recompiles": sum(n - (0 if before[frame] else 1) for frame, n in versions.items()),
            "given_up": sum(n + before[frame] > torch._dynamo.config.recompile_limit for frame, n in versions.items()),
            "found": now["inductor"]["fxgraph_cache_hit"],
            "made": now["inductor"]["fxgraph_cache_miss"],
            "why": dict((now["breaks"] + Counter(self._recompile_reasons())).most_common(3)),
        }

    def describe(self) -> str:
        """One sentence for the log."""
        counts = self.read()
        text = "compiled {graphs} graphs in {seconds:.1f} s, {graph_breaks} graph breaks, {recompiles} recompiles".format(**counts)
        text += f", {counts['given_up']} functions given up after too many versions" if counts["given_up"] else ""
        if counts["found"]:
            text += f", {counts['found']} of {counts['found'] + counts['made']} parts found ready"
        return text + "".join(f"; {n} x {reason}" for reason, n in counts["why"].items())

    def _recompile_reasons(self) -> list[str]:
        known: list[Any] = getattr(torch._dynamo.utils, "get_compilation_metrics", list)() if _dynamo_loaded() else []  # last 64
        recent = [m for m in known if (getattr(m, "start_time_us", 0) or 0) / 1e6 >= self._since]
        return [_shorten(re.sub(r"^\d+/\d+: ", "", why)) for m in recent if (why := getattr(m, "recompile_reason", None))]


def _dynamo_loaded() -> bool:
    return "torch._dynamo.convert_frame" in sys.modules  # if not, nothing was compiled, and the import would cost a second


def _dynamo_counters() -> dict[str, Counter]:
    """torch's own counters. They are not its public interface: what a version lacks counts as nothing."""
    inside = torch._dynamo.utils if _dynamo_loaded() else None
    counters, times = getattr(inside, "counters", {}), getattr(inside, "compilation_time_metrics", {})
    versions = getattr(torch._dynamo.convert_frame, "FRAME_COMPILE_COUNTER", {}) if _dynamo_loaded() else {}
    breaks: Counter = Counter()
    for reason, n in counters.get("graph_break", {}).items():
        breaks[_shorten(reason)] += n
    return {
        "stats": Counter(counters.get("stats", {})),
        "inductor": Counter(counters.get("inductor", {})),
        "breaks": breaks,
        "versions": Counter(versions),
        "seconds": Counter({name: sum(times.get(name, ())) for name in ("_compile.compile_inner", "backward._backward_impl")}),
    }


def _shorten(reason: str) -> str:
    return " ".join(re.split(r"\n\s*(?:Hint|Developer debug context)", reason)[0].replace("Explanation: ", "").split())[:200]


def cache_key(settings: Mapping[str, Any]) -> str:
    """Names compiled code by what it depends on: GPU, CPU, system, torch, Triton, CUDA and ``settings`` of model and step."""
    gpu = [torch.cuda.get_device_name(), torch.cuda.get_device_capability()] if torch.cuda.is_available() else None
    triton = [part.version for part in metadata.distributions(name="triton")]
    key = [torch.__version__, torch.version.git_version, torch.version.cuda, triton, sys.version_info[:2], gpu, _cpu_id(), settings]
    return hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _cpu_id() -> list[str]:
    """What names this processor: kernels in C++ are built for it, and would end the process on an older one."""
    names = r"^(?:model name|cpu family|model|flags|CPU implementer|CPU part|Features)\s*:.*$"
    cpuinfo = Path("/proc/cpuinfo")
    first = cpuinfo.read_text().split("\n\n")[0] if cpuinfo.exists() else ""
    return [os.uname().machine, os.confstr("CS_GNU_LIBC_VERSION") or "", *re.findall(names, first, re.MULTILINE)]


def restore_cache(folder: Path, key: str) -> bool:
    """Have torch keep compiled code on this node's disk, filled from the archive of ``key`` in ``folder``; False without one.

    Call it on every process, before anything is compiled. The place is below TORCHINDUCTOR_CACHE_DIR, otherwise TMPDIR. A damaged
    or foreign archive is ignored, with a warning. **It is code that will run** (libraries, pickles): a folder or an archive of
    another user, or that others can write to, is ignored as well, and so is an archive that is a link.
    """
    path = folder / f"{key}.zip"
    try:
        home = _set_cache_dir(key)
        _check_owner(folder.resolve())
        _check_owner(path)
        with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory(prefix=".new-", dir=home) as new:
            if archive.comment != key.encode():
                raise ValueError("made for something else")
            archive.extractall(new)  # checks every file's sum
            for name in archive.namelist():  # several ranks may do so at once
                (home / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(Path(new) / name, home / name)
        return True
    except FileNotFoundError:
        logger.info("no compiled code yet at %s", path)
    except Exception as error:  # zipfile, zlib and the system raise many kinds; all that is lost is time
        logger.warning("compiled code at %s is not used: %s", path, str(error) or type(error).__name__)
    return False


def store_cache(folder: Path, key: str) -> None:
    """Archive what was compiled since ``restore(folder, key)``, if anything was. One process of the job calls it."""
    path, home = folder / f"{key}.zip", Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
    new = folder / f".{key}.{os.uname().nodename}.{os.getpid()}"
    try:
        found = os.walk(home) if home.name == key else ()
        names = {os.path.relpath(os.path.join(where, file), home) for where, _, files in found for file in files}
        busy = {Path(name).stem for name in names if name.endswith(".lock") and _is_locked(home / name)}  # g++ is at work
        names = {n for n in names if not re.search(r"(^|/)\.|\.lock$", n) and Path(n).name.split(".")[0] not in busy}
        if not names or _archive_contains(path, key, names):
            return
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.comment = key.encode()
            for name in sorted(names):
                archive.write(home / name, name)
        new.chmod(0o600)  # whatever the umask
        os.replace(new, path)
    except Exception as error:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        logger.warning("compiled code is not kept at %s: %s", path, error)


def _archive_contains(path: Path, key: str, names: set[str]) -> bool:
    with suppress(Exception):  # one that is damaged, or may be another's, is written anew
        _check_owner(path)
        with zipfile.ZipFile(path) as archive:
            return archive.comment == key.encode() and names <= set(archive.namelist()) and archive.testzip() is None
    return False


def _set_cache_dir(key: str) -> Path:
    """Name to torch and Triton the folder on this node for compiled code of ``key``, and return it."""
    before, ours = os.environ.get("TORCHINDUCTOR_CACHE_DIR"), f"hpcai-compiled-{os.getuid()}"
    base = Path(before or tempfile.gettempdir())
    home = (base.parent if base.parent.name == ours else base / ours) / key
    home.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(home.parent)
    home.mkdir(exist_ok=True)
    if os.environ.get("TRITON_CACHE_DIR") in (None, f"{before}/triton"):
        os.environ["TRITON_CACHE_DIR"] = str(home / "triton")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(home)
    import torch._inductor.config as inductor

    if hasattr(inductor, "cpp_cache_precompile_headers"):  # 150 MB that lie elsewhere, and 6 s on each node
        inductor.cpp_cache_precompile_headers = False
    return home


def _check_owner(path: Path) -> None:
    """Raises PermissionError where somebody else may have put what lies at ``path``."""
    about = path.lstat()
    if stat.S_ISLNK(about.st_mode):
        raise PermissionError(f"{path} is a link, which may lead to what others wrote; delete it")
    if about.st_uid not in (os.getuid(), 0):
        raise PermissionError(f"{path} belongs to another user")
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others can write to {path}; delete it, or make sure of what it holds and chmod go-w it")


def _is_locked(path: Path) -> bool:
    with open(path, "rb") as file, suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    return True


class CompiledModel:
    """``model`` compiled in place by ``cfg.compile``, beginning with the code that ``cfg.compile_cache`` holds for it."""

    def __init__(self, model: nn.Module, cfg: StepConfig, mesh: Mesh) -> None:
        self._folder, self._first = cfg.compile_cache, mesh.is_first
        relevant = {name: getattr(cfg, name) for name in ("precision", "products", "compile", "accumulate", "shard")}
        self._key = cache_key({"model": repr(model), **relevant})
        restored = self._folder is not None and restore_cache(self._folder, self._key)
        count = compile_model(model, cfg.compile)
        suffix = ", beginning with the code of an earlier job" if restored else ""
        self.message = f"step.compile: {count} module{'s' if count > 1 else ''} of {type(model).__name__}{suffix}"
        self._counts = CompileCounts()
        self._logged_graphs = 0

    @property
    def seconds(self) -> float:
        return float(self._counts.read()["seconds"])

    def news(self) -> list[str]:
        """What has been compiled since the start, if more than at the last call; then it is also stored for later jobs."""
        graphs = self._counts.read()["graphs"]
        if graphs == self._logged_graphs:
            return []
        self._logged_graphs = graphs
        if self._folder is not None and self._first:
            store_cache(self._folder, self._key)
        return [self._counts.describe()]
