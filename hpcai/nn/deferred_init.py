"""Models that are built without memory for their parameters, sharded, and then initialised shard by shard.

    with deferred(seed):
        model = parallelize(Net(cfg))    # parameters on the meta device, with a trace of their initialisation
    materialize(model, device)           # allocates and initialises the shard of each parameter that this rank holds

A parameter becomes a meta tensor when a module registers it. Its random numbers depend on the seed, its name in the model, the
count of random operations on it before, and their index in the full tensor (``hpcai.kernels.philox``): a shard has the elements of
the full tensor on any rank. Elementwise operations, as most of ``nn.init``, are applied to the shard only. For others (``eye_``,
writes to a slice) the full tensor is computed on the CPU, and sliced. New tensors, and the result of ``nn.init.orthogonal_``, are
real and draw from torch's generator: all ranks need the same seed for them. A parameter that has elements when it is registered
keeps them until it is materialized; ``torch.empty`` takes no memory for them.
"""

import math
import traceback
from collections.abc import Iterator, Mapping
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
from hpcai.nn.init_trace import FILL_OPS, RANDOM_OPS, InitOp, InitTrace
from hpcai.nn.safetensors_files import Lazy, open_tensors

_COPY_OPS = ("clone", "_to_copy", "cat")  # by which a parameter is sharded, or gets another dtype or memory format
_active: list["_Recorder"] = []


class _Recorder(TorchDispatchMode):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.parameters: dict[int, nn.Parameter] = {}  # by the address of their storage, also of former ones
        self._storages: list[torch.UntypedStorage] = []  # so that the addresses are not reused
        self._registered = WeakIdKeyDictionary()  # the meta parameter of each real one, which modules may share

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled inside, and torch would import its compiler: 0.8 s

    def register(self, module: nn.Module, name: str, parameter: Any) -> Any:
        """Replace a parameter by a meta tensor. This is a registration hook of torch."""
        is_plain = type(parameter) is nn.Parameter and parameter.layout == torch.strided and parameter.device.type != "meta"
        if not is_plain or self not in _active:
            return None
        if parameter not in self._registered:
            base = parameter.detach()
            meta = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
            recorded: Any = nn.Parameter(meta, parameter.requires_grad)
            recorded.__dict__.update(parameter.__dict__, init_trace=InitTrace(self.seed, tuple(base.shape), base))
            self._registered[parameter] = recorded
            self.track(recorded)
        return self._registered[parameter]

    def track(self, parameter: nn.Parameter) -> None:
        storage = parameter.untyped_storage()
        self._storages.append(storage)
        self.parameters[storage._cdata] = parameter

    def find(self, x: Any) -> Any:
        """Return the recorded parameter that shares its storage with ``x``, or None."""
        if self not in _active or not isinstance(x, Tensor) or x.device.type != "meta":
            return None
        return self.parameters.get(x.untyped_storage()._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name, schema = kwargs or {}, func.overloadpacket.__name__, func._schema
        with torch._C.DisableTorchFunction():
            if all(self.find(x) is None for x in tree_leaves((args, kwargs))):
                return func(*args, **kwargs)
            named = dict(zip((a.name for a in schema.arguments), args)) | kwargs
            if written := tree_leaves([named.get(a.name) for a in schema.arguments if a.alias_info and a.alias_info.is_write]):
                self._record(func, args, kwargs, written)
                return written[0] if schema.returns else None
            on_meta = str(kwargs.get("device") or "meta") == "meta"
            if name.endswith("_like") or name.startswith("new_"):
                return func(*args, **kwargs | ({"device": torch.device("cpu")} if on_meta else {}))
            if (name in _COPY_OPS and on_meta) or all(result.alias_info for result in schema.returns):
                return func(*args, **kwargs)
            raise _read_error(name)

    def _record(self, func: Any, args: Any, kwargs: Any, written: list[Any]) -> None:
        name, target, parameter = func.overloadpacket.__name__, written[0], self.find(written[0])
        others = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x is not target]
        if parameter is None or len(written) > 1 or torch.Tag.inplace_view in func.tags:
            raise _read_error(name)
        trace, writes_all = parameter.init_trace, _layout(target) == _layout(parameter)
        is_full = tuple(parameter.shape) == trace.size
        value = others[0] if name == "copy_" and writes_all and is_full and others[0].shape == target.shape else None
        source = self.find(value)
        if value is not None and source is not None and _layout(source) == _layout(value) and source.init_trace.size == trace.size:
            trace.base, trace.ops = source.init_trace.base, list(source.init_trace.ops)
        elif any(x.device.type == "meta" for x in others):
            raise _read_error(name)
        elif value is not None:
            trace.base, trace.ops = value.detach().to(target.dtype, copy=True), []
        else:
            clones = {id(x): x.detach().clone() for x in others} | {id(target): ...}
            args, kwargs = tree_map(lambda x: clones.get(id(x), x), (args, kwargs))
            kwargs.pop("generator", None)
            view = None if writes_all else (*_layout(target)[:2], target.storage_offset() - parameter.storage_offset())
            op = InitOp(func, args, kwargs, view, parameter.stride(), parameter.dtype, trace, trace.draws)
            if not is_full and not op.is_elementwise:
                raise ConfigError(f"deferred: {name} at {_caller()} writes to a part of a parameter that is sharded; write before")
            if writes_all and name in (*RANDOM_OPS, *FILL_OPS):
                trace.base, trace.ops = None, []
            trace.draws += op.is_random
            trace.ops.append(op)


def _layout(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.stride(), x.storage_offset()


def _read_error(name: str) -> ConfigError:
    advice = "compute with another tensor and copy_ it into the parameter, or build the model outside of deferred"
    return ConfigError(f"deferred: aten.{name} at {_caller()} reads the elements of a parameter, which has none yet; {advice}")


def _caller() -> str:
    """Return the innermost line of the stack outside torch and this file."""
    frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename != __file__]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else "an unknown place"


class _MetaOverrides(TorchFunctionMode):
    """``is_meta`` is False for a recorded parameter, since functions such as ``nn.init.orthogonal_`` skip meta tensors, and a
    number that is written into it becomes a real tensor."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) is Tensor.is_meta and self.recorder.find(args[0]) is not None:
            return False
        if func is Tensor.__setitem__ and not isinstance(args[2], Tensor) and self.recorder.find(args[0]) is not None:
            args = (*args[:2], torch.tensor(args[2], dtype=args[0].dtype))
        result = func(*args, **(kwargs or {}))
        if func == Tensor.data.__set__ and "init_trace" in vars(args[0]):  # type: ignore[attr-defined]
            self.recorder.track(args[0])
        return result


@contextmanager
def deferred(seed: int = 0) -> Iterator[None]:
    """Context manager: parameters of new modules are on the meta device, and ``materialize`` will replay their initialisation.
    Raises ConfigError where their elements are read."""
    recorder, original = _Recorder(seed), nn.init._no_grad_trunc_normal_

    def truncated(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> Any:
        """Sample by the inverse CDF; torch's rejection sampling reads the elements."""
        if recorder.find(tensor) is None:
            return original(tensor, mean, std, a, b, generator=generator)
        low, high = (math.erf((x - mean) / (std * math.sqrt(2.0))) for x in (a, b))
        with torch.no_grad():
            return tensor.uniform_(low, high).erfinv_().mul_(std * math.sqrt(2.0)).add_(mean).clamp_(a, b)

    hook = register_module_parameter_registration_hook(recorder.register)
    _active.append(recorder)
    nn.init._no_grad_trunc_normal_ = truncated
    try:
        with recorder, _MetaOverrides(recorder):
            yield
    finally:
        hook.remove()
        _active.remove(recorder)
        nn.init._no_grad_trunc_normal_ = original
    for parameter in recorder.parameters.values():
        if trace := vars(parameter).get("init_trace"):
            trace.version = parameter._version


# ---- materialization


def record_names(model: nn.Module) -> None:
    """Record the names of the parameters in ``model``, on which their random numbers depend. ``materialize`` calls it; call it
    earlier if a submodule is materialized, or if parameters are renamed."""
    for name, parameter in model.named_parameters():
        if trace := getattr(parameter, "init_trace", None):
            trace.name = trace.name or name


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device | str, *, dtype: torch.dtype | None = None) -> nn.Module:
    """Allocate and initialise the meta parameters of ``model`` on ``device``, each the shard of its ``shard_spec``, if any.

    Parameters that modules share stay shared, and attributes stay. Everything else is moved as by ``.to``. A method
    ``post_materialize`` of a module is called as soon as its own parameters are materialized, and may replace them. All
    floating-point tensors are cast to ``dtype``. Raises ConfigError for a meta tensor without a trace, CheckpointError for a file
    that cannot be read.
    """
    active, _active[:] = _active[:], []  # also inside of deferred
    try:
        record_names(model)
        real: dict[nn.Parameter, nn.Parameter] = {}
        for path, module in model.named_modules():
            own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None and parameter.is_meta}
            for name, parameter in own.items():
                if parameter not in real:
                    real[parameter] = _materialize_parameter(parameter, f"{path}.{name}".lstrip("."), torch.device(device))
                module._parameters[name] = real[parameter]
            if own and (hook := getattr(module, "post_materialize", None)) is not None:
                hook()
                real.update((parameter, module._parameters[name]) for name, parameter in own.items())
        for name, buffer in model.named_buffers():
            if buffer.is_meta:
                text = f"buffer {name} is on the meta device: it read a parameter before materialize"
                raise ConfigError(f"{text}; compute it afterwards")
        tensors = (*model.parameters(), *model.buffers())
        if any(x.device != torch.device(device) or dtype not in (None, x.dtype) for x in tensors):
            with keep_attributes(model):
                model.to(device, dtype)
    finally:
        _active[:] = active
    return model


@contextmanager
def keep_attributes(model: nn.Module) -> Iterator[None]:
    """Context manager: buffers keep their attributes, such as ``shard_spec``, which ``model.to`` loses."""
    owners = [(part._buffers, name) for part in model.modules() for name, x in part._buffers.items() if x is not None]
    saved = [vars(buffers[name]) for buffers, name in owners]
    yield
    for (buffers, name), attributes in zip(owners, saved):
        vars(buffers[name]).update(attributes)


def _materialize_parameter(parameter: nn.Parameter, name: str, device: torch.device) -> nn.Parameter:
    trace: InitTrace | None = getattr(parameter, "init_trace", None)
    size, ranges = _shard_ranges(parameter)
    if trace is None:
        raise ConfigError(f"parameter {name} is on the meta device, but not of deferred (a deepcopy is not); build it there")
    if trace.version not in (None, parameter._version):
        raise ConfigError(f"parameter {name} was written between deferred and materialize; write it before or after")
    if size != trace.size or [sum(b - a for a, b in dim_ranges) for dim_ranges in ranges] != list(parameter.shape):
        advice = "use parallel.sharding"
        raise ConfigError(f"parameter {name} was {list(trace.size)}, and is {list(parameter.shape)} of {list(size)}; {advice}")
    local = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device)
    trace.write(local, ranges)
    materialized = nn.Parameter(local, parameter.requires_grad)
    materialized.__dict__.update({key: value for key, value in parameter.__dict__.items() if key != "init_trace"})
    del vars(parameter)["init_trace"]  # its base may have memory
    return materialized


def _shard_ranges(tensor: Tensor) -> tuple[tuple[int, ...], Any]:
    """Return the size of the full tensor, and for each dim the index ranges of it that ``tensor`` holds."""
    spec = getattr(tensor, "shard_spec", None)
    return (tuple(tensor.shape), [((0, n),) for n in tensor.shape]) if spec is None else (tuple(spec.global_shape), spec.ranges)


def read_on_materialize(model: nn.Module, source: str | Path | Mapping[str, Lazy], where: str | Path | None = None) -> None:
    """Let ``materialize`` read the meta parameters from safetensors files, each the shard of this rank. Parameters and buffers with
    memory are read now.

    ``source``: A file, a folder with ``model.safetensors.index.json``, or the tensors of ``where`` by name; it may hold more
    tensors, and of a tensor with several names one is enough. Raises CheckpointError for tensors that are missing or of another
    size, before anything is read.
    """
    where = where or str(source)
    stored: Mapping[str, Lazy] = source if isinstance(source, Mapping) else open_tensors(Path(source))
    errors, names, matches = list[str](), dict[Tensor, list[str]](), dict[Tensor, Lazy]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(tensor, []).append(name)
    for tensor, keys in names.items():
        key, size = next((key for key in keys if key in stored), None), _shard_ranges(tensor)[0]
        if key is None or stored[key].size != size:
            errors.append(f"{keys[0]} is missing" if key is None else f"{key} is {list(stored[key].size)}, expected {list(size)}")
        else:
            matches[tensor] = stored[key]
    if errors:
        more = f"; and {len(errors) - 10} more" if len(errors) > 10 else ""
        raise CheckpointError(f"{where}: not the weights of this {type(model).__name__}: {'; '.join(errors[:10])}{more}")
    for tensor, lazy in matches.items():
        trace = InitTrace(0, lazy.size, lazy)
        if tensor.device.type == "meta":  # not ``is_meta``, which is False inside of deferred
            tensor.init_trace = trace  # type: ignore[attr-defined]
        else:
            trace.write(tensor.detach(), _shard_ranges(tensor)[1])
