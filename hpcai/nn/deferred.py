"""Models that are built without memory for their parameters, cut, and then drawn part by part.

    with deferred(seed):
        model = parallelize(Net(cfg))    # parameters have sizes, and notes of what was done to them
    make(model, device)                  # now they have numbers: of each, the part that this process holds

A parameter becomes a meta tensor when a module registers it. Random numbers depend on the seed, the parameter's name in the model,
which of its random operations it is, and their index in the whole tensor (``hpcai.kernels.philox``): a part has the numbers of the
whole, whoever draws it. What is done element by element, as by most of ``nn.init``, is done to the part only. Where anything else
was done (``eye_``, a slice was written), the whole tensor is made on the CPU for a moment, and cut. Tensors that are made anew are
real, of torch's own random numbers, and so is what ``nn.init.orthogonal_`` computes: all processes need the same seed for those. A
parameter that has numbers when it is registered holds these until it is made; ``torch.empty`` costs nothing.
"""

import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from hpcai.errors import CheckpointError, ConfigError
from hpcai.nn.notes import DRAWS, FILLS, Note, Record
from hpcai.nn.stored import Stored, stored

_COPIES = ("clone", "_to_copy", "cat")  # by which a parameter is cut, or gets another dtype or order of memory
_tapes: list["_Tape"] = []  # that run


class _Tape(TorchDispatchMode):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.at: dict[int, nn.Parameter] = {}  # recorded ones by address of their memory, also of what was theirs
        self._kept: list[torch.UntypedStorage] = []  # so that no other gets these addresses
        self._taken = WeakIdKeyDictionary()  # a real parameter that is registered again is the same again

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled inside, and torch would import its compiler for this: 0.8 s

    def register(self, module: nn.Module, name: str, parameter: Any) -> Any:
        """Called by torch where a module gets a parameter."""
        plain = type(parameter) is nn.Parameter and parameter.layout == torch.strided and parameter.device.type != "meta"
        if not plain or self not in _tapes:
            return None
        if parameter not in self._taken:
            base = parameter.detach()
            meta = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
            made: Any = nn.Parameter(meta, parameter.requires_grad)
            made.__dict__.update(parameter.__dict__, deferred=Record(self.seed, tuple(base.shape), base))
            self._taken[parameter] = made
            self.keep(made)
        return self._taken[parameter]

    def keep(self, parameter: nn.Parameter) -> None:
        memory = parameter.untyped_storage()
        self._kept.append(memory)
        self.at[memory._cdata] = parameter

    def of(self, x: Any) -> Any:
        """The recorded parameter in whose memory ``x`` lies, or None."""
        if self not in _tapes or not isinstance(x, Tensor) or x.device.type != "meta":
            return None
        return self.at.get(x.untyped_storage()._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name, schema = kwargs or {}, func.overloadpacket.__name__, func._schema
        with torch._C.DisableTorchFunction():
            if all(self.of(x) is None for x in tree_leaves((args, kwargs))):
                return func(*args, **kwargs)
            words = dict(zip((a.name for a in schema.arguments), args)) | kwargs
            if written := tree_leaves([words.get(a.name) for a in schema.arguments if a.alias_info and a.alias_info.is_write]):
                self._note(func, args, kwargs, written)
                return written[0] if schema.returns else None
            on_meta = str(kwargs.get("device") or "meta") == "meta"
            if name.endswith("_like") or name.startswith("new_"):
                return func(*args, **kwargs | ({"device": torch.device("cpu")} if on_meta else {}))
            if (name in _COPIES and on_meta) or all(result.alias_info for result in schema.returns):
                return func(*args, **kwargs)
            raise _reads(name)

    def _note(self, func: Any, args: Any, kwargs: Any, written: list[Any]) -> None:
        name, target, parameter = func.overloadpacket.__name__, written[0], self.of(written[0])
        others = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x is not target]
        if parameter is None or len(written) > 1 or torch.Tag.inplace_view in func.tags:
            raise _reads(name)
        record, all_of_it = parameter.deferred, _lies(target) == _lies(parameter)
        uncut = tuple(parameter.shape) == record.size
        copied = others[0] if name == "copy_" and all_of_it and uncut and others[0].shape == target.shape else None
        source = self.of(copied)
        if copied is not None and source is not None and _lies(source) == _lies(copied) and source.deferred.size == record.size:
            record.base, record.notes = source.deferred.base, list(source.deferred.notes)
        elif any(x.device.type == "meta" for x in others):
            raise _reads(name)
        elif copied is not None:
            record.base, record.notes = copied.detach().to(target.dtype, copy=True), []
        else:
            kept = {id(x): x.detach().clone() for x in others} | {id(target): ...}
            args, kwargs = tree_map(lambda x: kept.get(id(x), x), (args, kwargs))
            kwargs.pop("generator", None)
            lies = None if all_of_it else (*_lies(target)[:2], target.storage_offset() - parameter.storage_offset())
            note = Note(func, args, kwargs, lies, parameter.stride(), parameter.dtype, record, record.draws)
            if not uncut and not note.by_element:
                raise ConfigError(f"deferred: {name} at {_where()} writes to a part of a parameter after it was cut; do so before")
            if all_of_it and name in (*DRAWS, *FILLS):
                record.base, record.notes = None, []
            record.draws += note.is_random
            record.notes.append(note)


def _lies(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.stride(), x.storage_offset()


def _reads(name: str) -> ConfigError:
    return ConfigError(
        f"deferred: aten.{name} at {_where()} reads the numbers of a parameter, which has none yet; compute with a tensor of "
        "your own and copy_ it into the parameter, or build the model outside of deferred"
    )


def _where() -> str:
    """The innermost line of a model or an app, outside torch and this file."""
    frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename != __file__]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else "an unknown place"


class _Seen(TorchFunctionMode):
    """torch leaves tensors of the meta device out, in ``nn.init.orthogonal_`` and others: a recorded parameter does not say that it
    is one, and a number that is written into it does not become one."""

    def __init__(self, tape: _Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) is Tensor.is_meta and self.tape.of(args[0]) is not None:
            return False
        if func is Tensor.__setitem__ and not isinstance(args[2], Tensor) and self.tape.of(args[0]) is not None:
            args = (*args[:2], torch.tensor(args[2], dtype=args[0].dtype))
        found = func(*args, **(kwargs or {}))
        if func == Tensor.data.__set__ and "deferred" in vars(args[0]):  # type: ignore[attr-defined]
            self.tape.keep(args[0])
        return found


@contextmanager
def deferred(seed: int = 0) -> Iterator[None]:
    """Inside, modules get parameters without memory, and what is done to these is noted (see the top of this file). Raises
    ConfigError where their numbers are read."""
    tape, ordinary = _Tape(seed), nn.init._no_grad_trunc_normal_

    def truncated(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> Any:
        """By the inverse of the distribution; torch draws again what is out of bounds, and so must look at it."""
        if tape.of(tensor) is None:
            return ordinary(tensor, mean, std, a, b, generator=generator)
        low, high = (math.erf((x - mean) / (std * math.sqrt(2.0))) for x in (a, b))
        with torch.no_grad():
            return tensor.uniform_(low, high).erfinv_().mul_(std * math.sqrt(2.0)).add_(mean).clamp_(a, b)

    hook = register_module_parameter_registration_hook(tape.register)
    _tapes.append(tape)
    nn.init._no_grad_trunc_normal_ = truncated
    try:
        with tape, _Seen(tape):
            yield
    finally:
        hook.remove()
        _tapes.remove(tape)
        nn.init._no_grad_trunc_normal_ = ordinary
    for parameter in tape.at.values():
        if record := vars(parameter).get("deferred"):
            record.version = parameter._version


# ---- numbers


def tell_names(model: nn.Module) -> None:
    """Have parameters remember their names in ``model``, on which their random numbers depend. ``make`` does so; call it earlier
    where a part of the model is made, or parameters get other names."""
    for name, parameter in model.named_parameters():
        if record := getattr(parameter, "deferred", None):
            record.name = record.name or name


@torch.no_grad()
def make(model: nn.Module, device: torch.device | str, seed: int | None = None, *, dtype: torch.dtype | None = None) -> nn.Module:
    """Give each parameter of ``model`` that has no memory its numbers on ``device``: the part that its ``place`` says, where it
    has one. Parameters that modules share stay one, and attributes stay. All else is moved as by ``.to``. A method ``weights_made``
    of a module is called as soon as its own parameters have numbers, and may replace them.

    ``seed``: in place of that of ``deferred``. ``dtype``: what all floating numbers are converted to. Raises ConfigError for a
    tensor whose numbers are not known, CheckpointError for a file that cannot be read.
    """
    running, _tapes[:] = _tapes[:], []  # inside of deferred, too
    try:
        tell_names(model)
        made: dict[nn.Parameter, nn.Parameter] = {}
        for path, module in model.named_modules():
            own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None and parameter.is_meta}
            for name, parameter in own.items():
                if parameter not in made:
                    made[parameter] = _made(parameter, f"{path}.{name}".lstrip("."), torch.device(device), seed)
                module._parameters[name] = made[parameter]
            if own and (then := getattr(module, "weights_made", None)) is not None:
                then()
                made.update((parameter, module._parameters[name]) for name, parameter in own.items())
        _move(model, device, dtype)
    finally:
        _tapes[:] = running
    return model


def _move(model: nn.Module, device: torch.device | str, dtype: torch.dtype | None) -> None:
    """Move what is real; buffers keep their attributes."""
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ConfigError(f"buffer {name} has no numbers: it was computed from parameters without any; compute it after make")
    owners = [(module._buffers, name) for module in model.modules() for name, x in module._buffers.items() if x is not None]
    said = [vars(buffers[name]) for buffers, name in owners]
    if all(x.device == torch.device(device) and dtype in (None, x.dtype) for x in (*model.parameters(), *model.buffers())):
        return
    model.to(device, dtype)
    for (buffers, name), attributes in zip(owners, said):
        vars(buffers[name]).update(attributes)


def _made(parameter: nn.Parameter, name: str, device: torch.device, seed: int | None) -> nn.Parameter:
    record: Record | None = getattr(parameter, "deferred", None)
    size, stretches = _place(parameter)
    if record is None:
        raise ConfigError(f"parameter {name} is on the meta device, but not of deferred (a deepcopy is not); build it there")
    if record.version not in (None, parameter._version):
        raise ConfigError(f"parameter {name} was written after deferred, when it had no numbers; do so inside, or after make")
    if size != record.size or [sum(b - a for a, b in held) for held in stretches] != list(parameter.shape):
        raise ConfigError(
            f"parameter {name} was {list(record.size)}, and is {list(parameter.shape)} of {list(size)}; cut it by parallel.sharding"
        )
    local = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device)
    record.write(local, stretches, seed)
    made = nn.Parameter(local, parameter.requires_grad)
    made.__dict__.update({key: value for key, value in parameter.__dict__.items() if key != "deferred"})
    del vars(parameter)["deferred"]  # whose base may be memory
    return made


def _place(tensor: Tensor) -> tuple[tuple[int, ...], Any]:
    """The size of the whole, and the stretches of it in each dim that ``tensor`` holds."""
    place = getattr(tensor, "shard_spec", None)
    return (tuple(tensor.shape), [((0, n),) for n in tensor.shape]) if place is None else (tuple(place.global_shape), place.ranges)


def read_later(model: nn.Module, source: str | Path, names: Callable[[str], str] = str) -> None:
    """Have ``make`` read the parameters without memory from safetensors, of each the part that is held. Parameters and buffers
    with memory are read now.

    ``source``: a file, or a folder with ``model.safetensors.index.json``, which may hold more. ``names`` gives the name there from
    that in the model; of a tensor with several names one is enough. Raises CheckpointError for what is missing or of another size,
    before anything is read.
    """
    there, wrong, known, found = stored(Path(source)), list[str](), dict[Tensor, list[str]](), dict[Tensor, Stored]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        known.setdefault(tensor, []).append(names(name))
    for tensor, keys in known.items():
        key, size = next((key for key in keys if key in there), None), _place(tensor)[0]
        if key is None or there[key].size != size:
            wrong.append(f"{keys[0]} is missing" if key is None else f"{key} is {list(there[key].size)}, expected {list(size)}")
        else:
            found[tensor] = there[key]
    if wrong:
        more = f"; and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise CheckpointError(f"{source}: not the weights of this {type(model).__name__}: {'; '.join(wrong[:10])}{more}")
    for tensor, one in found.items():
        record = Record(0, one.size, one)
        if tensor.device.type == "meta":  # ``is_meta`` says otherwise inside of deferred
            tensor.deferred = record  # type: ignore[attr-defined]
        else:
            record.write(tensor.detach(), _place(tensor)[1], None)
