"""Models that are built without memory for their parameters, cut, and then drawn part by part.

    with deferred(seed):
        model = parallelize(Net(cfg))    # parameters have sizes, and notes of what was done to them
    make(model, device)                  # now they have numbers: of each, the part that this process holds

A parameter becomes a meta tensor when a module registers it. Random numbers depend on the seed, the parameter's name in the model,
which of its random operations it is, and their index in the whole tensor (``hpcai.kernels.philox``): a part has the numbers of the
whole, whoever draws it. Operations element by element, as in most of ``nn.init``, are done to the part only. After any other one
(``eye_``, a slice that is written) the whole tensor is made on the CPU for a moment, and cut. Tensors that are made anew, and what
``nn.init.orthogonal_`` computes with, are real, of torch's own random numbers, for which all processes need the same seed. A
parameter that is registered with numbers keeps these until it is made; ``torch.empty`` costs nothing.
"""

import hashlib
import json
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from hpcai.errors import CheckpointError, ConfigError
from hpcai.kernels import philox

Stretches = Sequence[Sequence[tuple[int, int]]]
"""For each dim, first and last + 1 of the stretches of the whole that are held, which lie one after another."""

_BLOCK = 1 << 18  # numbers that one thread has under way: 1 MiB in float32
_FILLS = {"fill_", "zero_"}
_DRAWS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor, dict[str, Any]], Tensor]]] = {
    "uniform_": (philox.uniform, lambda x, w: x.mul_(w["to"] - w["from"]).add_(w["from"])),
    "normal_": (philox.normal, lambda x, w: x.mul_(w["std"]).add_(w["mean"])),
}
_COPIES = {"clone", "_to_copy", "cat"}  # by which a parameter is cut, or gets another dtype or order of memory
_open: list["_Tape"] = []


class Stored(NamedTuple):
    """A tensor in a safetensors file."""

    path: Path
    key: str
    size: tuple[int, ...]


@dataclass
class Record:
    """How a parameter of ``size`` gets its numbers: from ``base`` (None: ``notes`` begin by overwriting all) and then ``notes``."""

    seed: int
    size: tuple[int, ...]
    base: Tensor | Stored | None
    notes: list["Note"] = field(default_factory=list)
    draws: int = 0
    name: str | None = None
    version: int | None = None  # of the parameter when nothing more could be noted

    def box(self, local: Tensor, stretches: Stretches, seed: int | None) -> None:
        """Write the numbers of these stretches to ``local``, which is contiguous."""
        base, notes = self.base, self.notes
        if not all(note.by_element for note in notes):
            base, notes = self._replayed(seed), []
        if base is not None and not notes:
            return _fill(local, base, stretches)
        if base is not None:
            start = torch.empty(local.shape, dtype=notes[0].dtype, device=local.device)
            _fill(start, base, stretches)
        for rows, columns, run, first in _blocks(self.size, stretches, local):
            into = local.view(-1, run)[rows, columns]
            x = torch.empty(into.shape, dtype=_wide(notes[0].dtype), device=into.device)
            if base is not None:
                x.copy_(start.view(-1, run)[rows, columns])
            for note in notes:
                x = x.to(_wide(note.dtype))
                note.do(x, first, seed)
            into.copy_(x)
        return None

    def _replayed(self, seed: int | None) -> Tensor:
        """The whole tensor, by doing again all that was done."""
        x = torch.empty(self.size, dtype=self.notes[0].dtype)
        if self.base is not None:
            _fill(x, self.base, [((0, n),) for n in self.size])
        for note in self.notes:
            x = torch.empty_strided(self.size, note.layout, dtype=note.dtype).copy_(x)
            note.do(x if note.lies is None else x.as_strided(*note.lies), 0, seed)
        return x


@dataclass(frozen=True, eq=False)
class Note:
    """An operation on a parameter, or on a view of it that ``lies`` (size, stride, offset) in its memory.

    ``...`` stands for what is written among the arguments. ``layout`` and ``dtype`` are those of the parameter at that time.
    Random numbers are those of the record ``of`` which this is number ``number`` of the random operations.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    lies: tuple[Any, ...] | None
    layout: tuple[int, ...]
    dtype: torch.dtype
    of: Record
    number: int

    @property
    def name(self) -> str:
        return self.func.overloadpacket.__name__

    @property
    def is_random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.func.tags

    @property
    def by_element(self) -> bool:
        """Whether it does the same to a part as to the whole."""
        scalars = all(not isinstance(x, Tensor) or x.ndim == 0 for x in tree_leaves((self.args, self.kwargs)))
        known = self.name in _DRAWS or self.name in _FILLS or torch.Tag.pointwise in self.func.tags
        return self.lies is None and scalars and known and not (self.is_random and self.name not in _DRAWS)

    def do(self, x: Tensor, first: int | Tensor, seed: int | None) -> None:
        """To ``x``, whose numbers begin at index ``first`` of the whole; of a table [r, c], at ``first`` [r] in each row."""
        if self.is_random and self.name in _DRAWS:
            draw, shape = _DRAWS[self.name]
            words = {a.name: a.default_value for a in self.func._schema.arguments}
            words |= dict(zip(words, self.args)) | self.kwargs
            fits = x.is_contiguous() and x.dtype == _wide(x.dtype)
            out = x if fits else torch.empty(x.shape, dtype=_wide(x.dtype), device=x.device)
            count = x.numel() if isinstance(first, int) else x.shape[-1]
            draw(self.key(seed), first, count, out=out.view(-1) if isinstance(first, int) else out)
            if shape(out, words) is not x:
                x.copy_(out)
            return
        with torch.random.fork_rng(devices=[]) if self.is_random else nullcontext():
            if self.is_random:
                torch.default_generator.manual_seed(self.key(seed))
            args, kwargs = tree_map(lambda a: x if a is ... else a, (self.args, self.kwargs))
            self.func(*args, **kwargs)

    def key(self, seed: int | None) -> int:
        if self.of.name is None:
            raise ConfigError(f"{self.name}: numbers of a parameter that is not in the model were copied; keep that one in the model")
        text = f"{self.of.seed if seed is None else seed} {self.of.name} {self.number}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1  # torch's seeds are signed


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def _blocks(size: Sequence[int], stretches: Stretches, local: Tensor) -> Iterator[tuple[slice, slice, int, int | Tensor]]:
    """Rows and columns of ``local`` as a table, the length of its rows, and the index in the whole at which each row begins."""
    if not local.numel():
        return
    size, stretches = (tuple(size), stretches) if size else ((1,), (((0, 1),),))
    whole = [tuple(map(tuple, held)) == ((0, n),) for held, n in zip(stretches, size)]
    dim = max((d for d in range(len(size)) if not whole[d]), default=0)  # a row is what lies together from here on
    inner = math.prod(size[dim + 1 :])
    outer = [torch.cat([torch.arange(a, b) for a, b in held]) for held in stretches[:dim]]
    height, run, at = math.prod(map(len, outer)), inner * sum(b - a for a, b in stretches[dim]), 0
    most = _BLOCK * (torch.get_num_threads() if local.device.type == "cpu" else 64)
    for a, b in stretches[dim]:
        width = (b - a) * inner
        for c in range(0, width, most):
            end = min(c + most, width)
            rows = max(most // (end - c), 1)
            for r in range(0, height, rows):
                row = torch.arange(r, min(r + rows, height))
                place, first, step = slice(r, r + len(row)), torch.full_like(row, a * inner + c), size[dim] * inner
                for d in reversed(range(dim)):
                    first += outer[d][row % len(outer[d])] * step
                    row, step = row // len(outer[d]), step * size[d]
                yield place, slice(at + c, at + end), run, int(first) if len(first) == 1 else first.to(local.device)
        at += width


def _fill(into: Tensor, source: Tensor | Stored | Any, stretches: Stretches) -> None:
    """Copy these stretches of ``source``, in pieces."""
    if isinstance(source, Stored):
        with _opened(source.path) as file:
            return _fill(into, file.get_slice(source.key) if source.size else file.get_tensor(source.key), stretches)
    dims, most = [], max(_BLOCK * 16 // max(math.prod(into.shape[1:]), 1), 1)
    for d, held in enumerate(stretches):
        at, pairs = 0, []
        for a, b in held:
            step = most if d == 0 else max(b - a, 1)
            pairs += [(slice(c, min(c + step, b)), slice(at + c - a, at + min(c + step, b) - a)) for c in range(a, b, step)]
            at += b - a
        dims.append(pairs)
    for box in product(*dims):
        into[tuple(here for _, here in box)] = source[tuple(there for there, _ in box)].to(into.device)
    return None


# ---- notes of what is done


class _Tape(TorchDispatchMode):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.parameters = seed, list[nn.Parameter]()
        self._at: dict[int, nn.Parameter] = {}  # by address of their memory
        self._taken = WeakIdKeyDictionary()  # a real parameter that is registered again becomes the same

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled inside, and torch would import its compiler for this: 0.8 s

    def register(self, module: nn.Module, name: str, parameter: Any) -> Any:
        """Called by torch where a module gets a parameter."""
        if type(parameter) is not nn.Parameter or parameter.device.type == "meta" or parameter.layout != torch.strided:
            return None
        if parameter not in self._taken:
            like = parameter.detach()
            made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
            self._taken[parameter] = made = nn.Parameter(made, parameter.requires_grad)
            made.__dict__.update(parameter.__dict__)
            made.deferred = Record(self.seed, tuple(like.shape), like)  # type: ignore[attr-defined]
            self.parameters.append(made)
        return self._taken[parameter]

    def of(self, x: Any) -> Any:
        """The recorded parameter whose memory ``x`` is a view of, or None."""
        if not isinstance(x, Tensor) or x.device.type != "meta":
            return None
        at = x.untyped_storage()._cdata
        if at not in self._at or self._at[at].untyped_storage()._cdata != at:  # .data of parameters may be replaced
            self._at = {p.untyped_storage()._cdata: p for p in self.parameters}
        return self._at.get(at)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        with torch._C.DisableTorchFunction():
            known = [x for x in tree_leaves((args, kwargs)) if self.of(x) is not None]
            if not known:
                return func(*args, **kwargs)
            written = [x for x in _written(func, args, kwargs) if x is not None]
            if written:
                return self._note(func, args, kwargs, written, known)
            if name.endswith("_like") or name.startswith("new_"):
                where = torch.device(kwargs.get("device") or "meta")
                return func(*args, **kwargs | {"device": torch.device("cpu") if where.type == "meta" else where})
            if name in _COPIES and torch.device(kwargs.get("device") or "meta").type == "meta":
                return func(*args, **kwargs)
            if not all(result.alias_info is not None for result in func._schema.returns):
                raise _reads(name)
            return func(*args, **kwargs)

    def _note(self, func: Any, args: Any, kwargs: Any, written: list[Any], known: list[Tensor]) -> Any:
        name, target = func.overloadpacket.__name__, written[0]
        parameter = self.of(target)
        if len(written) > 1 or parameter is None:
            raise _reads(name)
        record, sources = parameter.deferred, [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x is not target]
        whole = _lies(target) == _lies(parameter)
        uncut = tuple(parameter.shape) == record.size
        if any(x.device.type == "meta" for x in sources):
            other = self.of(sources[0])
            if name != "copy_" or other is None or not (whole and uncut and _lies(other)[0] == _lies(parameter)[0] == other.deferred.size):
                raise _reads(name)
            record.base, record.notes = other.deferred.base, list(other.deferred.notes)
            return target
        if name == "copy_" and whole and uncut and sources[0].shape == target.shape:
            record.base, record.notes = sources[0].detach().to(target.dtype, copy=True), []
            return target
        lies = None if whole else (*_lies(target)[:2], target.storage_offset() - parameter.storage_offset())
        args, kwargs = tree_map(lambda x: ... if x is target else x.detach().clone() if isinstance(x, Tensor) else x, (args, kwargs))
        kwargs.pop("generator", None)
        note = Note(func, args, kwargs, lies, parameter.stride(), parameter.dtype, record, record.draws)
        if not uncut and not note.by_element:
            raise ConfigError(f"deferred: {name} at {_where()} writes a part of a parameter that has been cut; do so before it is cut")
        record.draws += note.is_random
        if whole and (name in _DRAWS or name in _FILLS):
            record.base, record.notes = None, []
        record.notes.append(note)
        return target if func._schema.returns else None


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    words = dict(zip((a.name for a in func._schema.arguments), args)) | kwargs
    names = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [x for name in names for x in tree_leaves(words.get(name))]


def _lies(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.stride(), x.storage_offset()


def _reads(name: str) -> ConfigError:
    return ConfigError(
        f"deferred: aten.{name} at {_where()} reads the numbers of a parameter, which has none yet; compute with a tensor of your own "
        "and copy_ it into the parameter, or build the model outside of deferred"
    )


def _where() -> str:
    """The innermost line of a model or an app, outside torch and this file."""
    frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename not in (__file__, "<string>")]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else "an unknown place"


class _Seen(TorchFunctionMode):
    """``nn.init.orthogonal_`` and others do nothing to a tensor of the meta device: a recorded parameter does not say that it is."""

    def __init__(self, tape: _Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) is torch.Tensor.is_meta and self.tape.of(args[0]) is not None:
            return False
        if func is torch.Tensor.__setitem__ and not isinstance(args[2], Tensor) and self.tape.of(args[0]) is not None:
            args = (*args[:2], torch.tensor(args[2], dtype=args[0].dtype))  # torch would make it a meta tensor
        return func(*args, **(kwargs or {}))


@contextmanager
def deferred(seed: int = 0) -> Iterator[None]:
    """Inside, modules get parameters without memory, and what is done to these is noted (see the top of this file). Raises
    ConfigError where their numbers are read."""
    tape, ordinary = _Tape(seed), getattr(nn.init, "_no_grad_trunc_normal_", None)

    def truncated(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> Any:
        """By the inverse of the distribution, where torch draws again what is out of bounds until it has looked at all."""
        if tape.of(tensor) is None:
            return ordinary(tensor, mean, std, a, b, generator=generator)  # type: ignore[misc]
        low, high = (math.erf((x - mean) / (std * math.sqrt(2.0))) for x in (a, b))
        with torch.no_grad():
            return tensor.uniform_(low, high).erfinv_().mul_(std * math.sqrt(2.0)).add_(mean).clamp_(a, b)

    hook = register_module_parameter_registration_hook(tape.register)
    _open.append(tape)
    if ordinary:
        nn.init._no_grad_trunc_normal_ = truncated
    try:
        with tape, _Seen(tape):
            yield
    finally:
        hook.remove()
        _open.remove(tape)
        if ordinary:
            nn.init._no_grad_trunc_normal_ = ordinary
    for parameter in tape.parameters:
        parameter.deferred.version = parameter._version  # type: ignore[attr-defined]


# ---- numbers


@torch.no_grad()
def make(model: nn.Module, device: torch.device | str, seed: int | None = None, *, dtype: torch.dtype | None = None) -> nn.Module:
    """Give each parameter of ``model`` that has no memory its numbers on ``device``: the part that its ``place`` says, where it
    has one. Parameters that modules share stay one, and attributes stay; so do those of buffers. All else is moved as by ``.to``.

    ``seed``: in place of that of ``deferred``. ``dtype``: of all floating numbers. Raises ConfigError for a tensor whose numbers
    are not known, CheckpointError for a file that cannot be read.
    """
    if _open:
        raise ConfigError("make: inside of deferred, which would take the numbers away again; call it after the with block")
    tell_names(model)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    full = f"{path}.{name}" if path else name
                    made[parameter] = _made(parameter, full, torch.device(device), dtype, seed)
                setattr(module, name, made[parameter])
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ConfigError(f"buffer {name} has no numbers: it was computed from parameters without any; compute it after make")
    said = [(module, name, buffer.__dict__) for module in model.modules() for name, buffer in module._buffers.items() if buffer is not None]
    model.to(device, dtype)
    for module, name, attributes in said:
        module._buffers[name].__dict__.update(attributes)
    return model


def _made(parameter: nn.Parameter, name: str, device: torch.device, dtype: torch.dtype | None, seed: int | None) -> nn.Parameter:
    record, stretches = getattr(parameter, "deferred", None), _held(parameter)
    if record is None:
        raise ConfigError(f"parameter {name} is on the meta device, and was not built inside of deferred; build it there, or read it")
    if record.version is not None and record.version != parameter._version:
        raise ConfigError(f"parameter {name} was written after deferred, when it had no numbers; do so inside, or after make")
    size = getattr(getattr(parameter, "place", None), "size", tuple(parameter.shape))
    if tuple(size) != record.size or tuple(sum(b - a for a, b in held) for held in stretches) != tuple(parameter.shape):
        raise ConfigError(
            f"parameter {name} is {list(parameter.shape)} of {list(size)}, but was built as {list(record.size)}; cut it by "
            "parallel.rows.cut, which says what is left of it"
        )
    kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    local = torch.empty(parameter.shape, dtype=kind, device=device)
    record.box(local, stretches, seed)
    if local.stride() != parameter.stride():
        local = torch.empty_strided(parameter.shape, parameter.stride(), dtype=kind, device=device).copy_(local)
    made = nn.Parameter(local, parameter.requires_grad)
    made.__dict__.update({key: value for key, value in parameter.__dict__.items() if key != "deferred"})
    del parameter.deferred  # type: ignore[attr-defined] its base is memory
    return made


def _held(tensor: Tensor) -> Stretches:
    place = getattr(tensor, "place", None)
    return place.stretches if place is not None else [((0, n),) for n in tensor.shape]


def tell_names(model: nn.Module) -> None:
    """Have parameters remember their names in ``model``, on which their random numbers depend. ``make`` does so; call it before
    where only a part of the model is made, or under other names."""
    for name, parameter in model.named_parameters():
        if record := getattr(parameter, "deferred", None):
            record.name = record.name or name


# ---- numbers of files


def read_later(model: nn.Module, source: str | Path, names: Callable[[str], str] | None = None) -> None:
    """Have ``make`` read the parameters without memory from safetensors, of each the part that is held. Parameters and buffers
    with memory are read now.

    ``source``: a file, or a folder with ``model.safetensors.index.json``. ``names`` gives the name in the file from that in the
    model; of a parameter with several names one is enough. The files may hold more. Raises CheckpointError for tensors that are
    missing or of other sizes, before any is read.
    """
    stored, wrong, known = _stored(Path(source)), list[str](), dict[Tensor, list[str]]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        known.setdefault(tensor, []).append(names(name) if names else name)
    found: list[tuple[Tensor, Stored]] = []
    for tensor, keys in known.items():
        size = tuple(getattr(getattr(tensor, "place", None), "size", tensor.shape))
        if key := next((key for key in keys if key in stored), None):
            found.append((tensor, stored[key]))
            wrong += [] if stored[key].size == size else [f"{key} is {list(stored[key].size)}, expected {list(size)}"]
        else:
            wrong.append(f"{keys[0]} is missing")
    if wrong:
        more = f"; and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise CheckpointError(f"{source}: not the weights of this {type(model).__name__}: {'; '.join(wrong[:10])}{more}")
    for tensor, one in found:
        if tensor.is_meta and isinstance(tensor, nn.Parameter):
            tensor.deferred = Record(0, one.size, one)  # type: ignore[attr-defined]
        else:
            _fill(tensor.detach(), one, _held(tensor))


def _stored(source: Path) -> dict[str, Stored]:
    files = [source]
    if source.is_dir():
        index = source / "model.safetensors.index.json"
        try:
            files = sorted({source / name for name in json.loads(index.read_text())["weight_map"].values()})
        except (OSError, ValueError, LookupError, AttributeError) as problem:
            raise CheckpointError(f"{index}: no index of safetensors files: {problem!r}; expected a weight_map") from problem
    found: dict[str, Stored] = {}
    for path in files:
        with _opened(path) as file:
            found |= {key: Stored(path, key, tuple(file.get_slice(key).get_shape())) for key in file.keys()}  # noqa: SIM118 not a dict
    return found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as problem:
        raise CheckpointError(f"{path}: no safetensors file, or damaged: {problem}") from problem
