"""torch.compile for models: in place, with counters, and with a cache on disk that later jobs reuse.

The cache is one archive per key, of the files that Inductor and Triton leave on a node's local disk. torch's portable format
(``torch.compiler.save_cache_artifacts``) is not used: it lacks the binaries of C++ kernels, which g++ would build again.
"""

import fcntl
import hashlib
import json
import logging
import os
import platform
import re
import shutil
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
from hpcai.host_limits import read_text
from hpcai.kernels import triton_support
from hpcai.parallel.pipeline_stages import StageOutput
from hpcai.settings import StepConfig

logger = logging.getLogger(__name__)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of ``model``: children of an nn.ModuleList or nn.Sequential that has two or more of the same
    class. The outermost ones count. torch's own layers do not, nor does a list or stage that itself holds blocks. A block is also
    repeated if others of its class are on other pipeline stages."""
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
    """Compile ``model`` at its next call, in place, so that checkpoint keys stay. Return the number of compiled modules. ``blocks``
    compiles each repeated block: torch compiles equal blocks once. Raises ConfigError if there is none, or no compiler."""
    if mode == "none":
        return 0
    modules = [model] if mode == "whole" else repeated_blocks(model)
    if not modules:
        raise ConfigError(f"compile: blocks, but {type(model).__name__} has no repeated blocks; set compile: whole")
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    missing = None if shutil.which(compiler) else f"there is no {compiler}, which compiles for CPUs (install it, or set CXX)"
    if any(parameter.is_cuda for parameter in model.parameters()):
        missing = triton_support.MISSING
    if backend == "inductor" and missing:
        raise ConfigError(f"step.compile is {mode}, but {missing}; otherwise set it to none")
    # Blocks of a class share a code object. torch counts its versions (size, training, gradients), and past its limit (8) would
    # run blocks uncompiled.
    kinds = {(type(block), tuple(tuple(p.shape) for p in block.parameters())) for block in modules}
    most = max(Counter(kind for kind, _ in kinds).values())
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 8 * most)
    options = {"options": {"triton.cudagraphs": False}} if backend == "inductor" else {}  # a step is captured as a whole
    for module in modules:
        # torch silently skips a call that never leaves its own files, such as that of layers in an nn.Sequential.
        of_torch = all(type(part).__module__.startswith("torch.") for part in module.modules())
        call = _call_outside_torch(module) if of_torch else module._call_impl
        module._compiled_call_impl = torch.compile(call, dynamic=dynamic, fullgraph=False, backend=backend, **options)  # type: ignore[call-overload]
    return len(modules)


def _call_outside_torch(module: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    return call


class CompileCounts:
    """Counters of torch.compile in this process since construction. After the first steps all should stay 0."""

    def __init__(self) -> None:
        self._since, self._start = time.time(), _dynamo_counters()

    def read(self) -> dict[str, Any]:
        """Return the counts: graphs, seconds (with the backward graphs), graph_breaks, recompiles (of a frame, also for other sizes
        of a block), over_limit (frames past the limit of versions, which run uncompiled), cache_hits and cache_misses
        (Inductor's, forward and backward), and reasons: the most frequent ones with their counts."""
        now = {name: counter - self._start[name] for name, counter in _dynamo_counters().items()}  # a Counter keeps positive counts
        before, versions = self._start["versions"], now["versions"]
        metrics: list[Any] = getattr(torch._dynamo.utils, "get_compilation_metrics", list)() if _dynamo_loaded() else []  # last 64
        recent = [m for m in metrics if (getattr(m, "start_time_us", 0) or 0) / 1e6 >= self._since]
        causes = [_shorten(re.sub(r"^\d+/\d+: ", "", why)) for m in recent if (why := getattr(m, "recompile_reason", None))]
        return {
            "graphs": int(now["stats"]["unique_graphs"]),
            "seconds": round(sum(now["seconds"].values()), 3),
            "graph_breaks": sum(now["breaks"].values()),
            "recompiles": sum(n - (0 if before[frame] else 1) for frame, n in versions.items()),
            "over_limit": sum(n + before[frame] > torch._dynamo.config.recompile_limit for frame, n in versions.items()),
            "cache_hits": now["inductor"]["fxgraph_cache_hit"],
            "cache_misses": now["inductor"]["fxgraph_cache_miss"],
            "reasons": dict((now["breaks"] + Counter(causes)).most_common(3)),
        }

    def describe(self) -> str:
        """Return a log message with the counts."""
        counts = self.read()
        text = "compiled {graphs} graphs in {seconds:.1f} s, {graph_breaks} graph breaks, {recompiles} recompiles".format(**counts)
        text += f", {counts['over_limit']} functions given up after too many versions" if counts["over_limit"] else ""
        if counts["cache_hits"]:
            text += f", {counts['cache_hits']} of {counts['cache_hits'] + counts['cache_misses']} parts found ready"
        return text + "".join(f"; {n} x {reason}" for reason, n in counts["reasons"].items())


def _dynamo_loaded() -> bool:
    return "torch._dynamo.convert_frame" in sys.modules  # otherwise nothing was compiled, and the import would take 1 s


def _dynamo_counters() -> dict[str, Counter]:
    """Return torch's counters. They are not public: a counter that this version lacks is 0."""
    utils = torch._dynamo.utils if _dynamo_loaded() else None
    counters, times = getattr(utils, "counters", {}), getattr(utils, "compilation_time_metrics", {})
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
    """Return a key of compiled code: GPU, CPU, system, torch, Triton, CUDA and ``settings`` of model and step."""
    gpu = [torch.cuda.get_device_name(), torch.cuda.get_device_capability()] if torch.cuda.is_available() else None
    triton = [part.version for part in metadata.distributions(name="triton")]
    key = [torch.__version__, torch.version.git_version, torch.version.cuda, triton, sys.version_info[:2], gpu, _cpu_id(), settings]
    return hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _cpu_id() -> list[str]:
    """Return the identity of the CPU: C++ kernels are built for it, and would crash on an older one."""
    names = r"^(?:model name|cpu family|model|flags|CPU implementer|CPU part|Features)\s*:.*$"
    first = read_text(Path("/proc/cpuinfo")).split("\n\n")[0]
    return [os.uname().machine, " ".join(platform.libc_ver()), *re.findall(names, first, re.MULTILINE)]


def restore_cache(folder: Path, key: str) -> bool:
    """Set torch's compile cache to a folder on local disk, filled from the archive of ``key`` in ``folder``; return False without
    one. Call it on every rank, before anything is compiled. The folder is below TORCHINDUCTOR_CACHE_DIR, otherwise TMPDIR. A
    damaged or foreign archive is ignored, with a warning. **The archive is code that will run** (libraries, pickles): a folder or
    an archive that another user owns or can write to is ignored as well, and so is an archive that is a link."""
    path = folder / f"{key}.zip"
    try:
        home = _set_cache_dir(key)
        _check_owner(folder.resolve())
        _check_owner(path)
        with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory(prefix=".new-", dir=home) as new:
            if archive.comment != key.encode():
                raise ValueError("its key differs")
            archive.extractall(new)  # verifies checksums
            for name in archive.namelist():  # several ranks may do so concurrently
                (home / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(Path(new) / name, home / name)
        return True
    except FileNotFoundError:
        logger.info("no compiled code yet at %s", path)
    except Exception as error:  # many types, of zipfile, zlib and the system; only time is lost
        logger.warning("compiled code at %s is not used: %s", path, str(error) or type(error).__name__)
    return False


def store_cache(folder: Path, key: str) -> None:
    """Archive code that was compiled since ``restore_cache(folder, key)``, if there is any. One rank of the job calls it."""
    path, home = folder / f"{key}.zip", Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
    new = folder / f".{key}.{os.uname().nodename}.{os.getpid()}"
    try:
        walk = os.walk(home) if home.name == key else ()
        names = {os.path.relpath(os.path.join(where, file), home) for where, _, files in walk for file in files}
        busy = {Path(name).stem for name in names if name.endswith(".lock") and _is_locked(home / name)}  # g++ is running
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
    with suppress(Exception):  # a damaged or foreign archive is rewritten
        _check_owner(path)
        with zipfile.ZipFile(path) as archive:
            return archive.comment == key.encode() and names <= set(archive.namelist()) and archive.testzip() is None
    return False


def _set_cache_dir(key: str) -> Path:
    """Set the local cache folder of torch and Triton for ``key``, and return it."""
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

    if hasattr(inductor, "cpp_cache_precompile_headers"):  # 150 MB outside the folder, and 6 s on each node
        inductor.cpp_cache_precompile_headers = False
    return home


def _check_owner(path: Path) -> None:
    """Raise PermissionError if another user may have written the contents of ``path``, or can replace it or a folder above it."""
    about = path.lstat()
    if stat.S_ISLNK(about.st_mode):
        raise PermissionError(f"{path} is a link, which may lead to files of other users; delete it")
    if about.st_uid not in (os.getuid(), 0):
        raise PermissionError(f"{path} belongs to another user")
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"other users can write to {path}; delete it, or verify its contents and chmod go-w it")
    for folder in path.absolute().parents:
        about = folder.stat()
        if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not about.st_mode & stat.S_ISVTX:
            raise PermissionError(f"other users can write to {folder}, above {path}; chmod go-w it, or use another folder")


def _is_locked(path: Path) -> bool:
    with open(path, "rb") as file, suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    return True


class CompiledModel:
    """A model that is compiled in place by ``cfg.compile``, beginning with the code of ``cfg.compile_cache``."""

    def __init__(self, model: nn.Module, cfg: StepConfig, mesh: Mesh) -> None:
        self._folder, self._first = cfg.compile_cache, mesh.is_first
        relevant = {name: getattr(cfg, name) for name in ("precision", "matmul", "compile", "accumulate", "shard")}
        self._key = cache_key({"model": repr(model), **relevant})
        restored = self._folder is not None and restore_cache(self._folder, self._key)
        count = compile_model(model, cfg.compile)
        suffix = ", beginning with the code of an earlier job" if restored else ""
        self.message = f"step.compile: {count} module{'s' if count > 1 else ''} of {type(model).__name__}{suffix}"
        self.counts = CompileCounts()
        self._logged_graphs = 0

    def news(self) -> list[str]:
        """Return a message with the counts since the start, if there are new graphs. New code is then also archived."""
        graphs = self.counts.read()["graphs"]
        if graphs == self._logged_graphs:
            return []
        self._logged_graphs = graphs
        if self._folder is not None and self._first:
            store_cache(self._folder, self._key)
        return [self.counts.describe()]
