"""Deferred initialisation: elements have the distribution of an ordinary model, and do not depend on the sharding."""

import copy
import ctypes
import json
import math
import multiprocessing
import random
import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hpcai import train
from hpcai.dist import single_process
from hpcai.dist.mesh import Axis
from hpcai.errors import CheckpointError, ConfigError
from hpcai.models import cosmoflow, deepcam, dimenet, openfold, unet3d
from hpcai.nn import init_trace
from hpcai.nn.deferred_init import deferred, materialize, read_on_materialize, record_names
from hpcai.parallel.sharding import shard_


class Everything(nn.Module):
    """A model whose parameters are initialised in every supported way."""

    def __init__(self) -> None:
        super().__init__()
        self.uniform, self.tied = nn.Linear(37, 29), nn.Linear(37, 29)
        self.tied.weight = self.uniform.weight
        self.normal = nn.Parameter(torch.empty(5, 130, 7))
        self.short = nn.Linear(300, 8, bias=False)
        self.glorot, self.volume = nn.Linear(16, 40), nn.Conv3d(4, 6, 3)
        self.he, self.dirac, self.sparse = nn.Conv2d(3, 8, (3, 5)), nn.Conv1d(6, 6, 3), nn.Linear(20, 30)
        self.orthogonal, self.rows, self.one = nn.Linear(24, 12), nn.Linear(9, 33), nn.Linear(6, 6)
        self.wide, self.narrow = nn.Parameter(torch.empty(31, 9).double()), nn.Parameter(torch.empty(40, 20).bfloat16())
        self.decay, self.waves = nn.Parameter(torch.empty(3, 50)), nn.Parameter(torch.arange(1, 7) * math.pi)
        self.ones, self.full = nn.Parameter(torch.ones(3, 1, 1)), nn.Parameter(torch.full((4,), 0.5))
        self.norm, self.batch, self.table = nn.LayerNorm(11), nn.BatchNorm2d(6), nn.Embedding(30, 10, padding_idx=3)
        self.scalar, self.none = nn.Parameter(torch.tensor(2.5)), nn.Parameter(torch.empty(0, 4))
        self.frozen = nn.Parameter(torch.zeros(3, 5), requires_grad=False)
        self.given, self.standard, self.reset = nn.Linear(4, 3), nn.Linear(20, 30), nn.Linear(12, 12)
        self.shifted = nn.Linear(20, 7)
        self.later, self.attention, self.memory = nn.Linear(8, 8), nn.MultiheadAttention(12, 3), nn.LSTM(5, 6)
        self.several = nn.ParameterList([torch.ones(2, 2), nn.Parameter(torch.empty(4).fill_(3))])
        nn.init.normal_(self.normal, 1.0, 3.0)
        nn.init.trunc_normal_(self.short.weight, std=0.02, a=-0.03, b=0.03)
        nn.init.xavier_uniform_(self.glorot.weight)
        nn.init.kaiming_normal_(self.he.weight, nonlinearity="relu")
        nn.init.orthogonal_(self.orthogonal.weight)
        nn.init.orthogonal_(self.rows.weight[:16])
        nn.init.eye_(self.one.weight)
        nn.init.dirac_(self.dirac.weight)
        nn.init.sparse_(self.sparse.weight, 0.3)
        nn.init.uniform_(self.wide, -2, 3)
        nn.init.normal_(self.narrow)
        nn.init.constant_(self.batch.bias, 0.25)
        self.reset.reset_parameters()
        self.given.load_state_dict({"weight": torch.arange(12.0).view(3, 4), "bias": torch.ones(3)})
        with torch.no_grad():
            self.decay.exponential_(2.0).clamp_(max=1.5)
            self.shifted.weight.add_(torch.linspace(0, 0.01, 20))
            self.standard.weight[:, 0].zero_()
            self.standard.weight.mul_(torch.tensor(2.0)).sub_(torch.linspace(0, 0.01, 20))
            nn.init.xavier_uniform_(self.later.weight.chunk(2)[0])


RANDOM = {"uniform.weight", "normal", "short.weight", "glorot.weight", "volume.weight", "he.weight", "sparse.weight", "wide",
         "narrow", "decay", "table.weight", "standard.weight", "reset.weight", "later.weight", "attention.in_proj_weight",
         "memory.weight_ih_l0"}  # fmt: skip


def build(kind: Callable[[], nn.Module] = Everything, seed: int = 1) -> Any:
    torch.manual_seed(0)  # for operations that draw from torch's generator
    with deferred(seed):
        return kind()


def build_and_materialize(kind: Callable[[], nn.Module] = Everything, seed: int = 1) -> Any:
    return materialize(build(kind, seed), "cpu")


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def random_ranges(size: Sequence[int], r: random.Random) -> list[list[tuple[int, int]]]:
    """Return one to three index ranges of each dim; of some dims the full range."""
    return [[(0, n)] if r.random() < 0.3 or n == 0 else
            [tuple(sorted(r.choices(range(n + 1), k=2))) for _ in range(r.randint(1, 3))] for n in size]  # type: ignore[misc] # fmt: skip


def take_ranges(x: Tensor, ranges: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    for d, dim in enumerate(ranges):
        x = x.index_select(d, torch.cat([torch.arange(a, b) for a, b in dim]))
    return x


def set_shard(parameter: Any, ranges: Sequence[Sequence[tuple[int, int]]]) -> None:
    parameter.shard_spec = SimpleNamespace(global_shape=tuple(parameter.shape), ranges=ranges)
    size = [sum(b - a for a, b in dim) for dim in ranges]
    parameter.data = torch.empty(size, dtype=parameter.dtype, device="meta")


MODELS: dict[str, Callable[[], nn.Module]] = {
    "everything": Everything,
    "cosmoflow": lambda: cosmoflow.parallelize(
        cosmoflow.CosmoFlow(cosmoflow.CosmoFlowConfig(size=16, blocks=3, filters=8)), single_process()),
    "deepcam": lambda: deepcam.DeepCam(deepcam.DeepCamConfig(divide=4)),
    "deepcam, initialised as by the vendor": lambda: deepcam.DeepCam(deepcam.DeepCamConfig(divide=4, init="vendor")),
    "dimenet": lambda: dimenet.DimeNet(dimenet.DimeNetConfig(hidden=64)),
    "openfold": lambda: openfold.OpenFold(openfold.OpenFoldConfig.preset("tiny")),
    "unet3d": lambda: unet3d.UNet3D(unet3d.UNet3DConfig(filters=(4, 8, 16))),
}


@pytest.mark.parametrize("name", MODELS)
def test_elements_have_the_distribution_of_an_ordinary_model(name: str) -> None:
    torch.manual_seed(0)
    ordinary = MODELS[name]()
    with train.seeds(1):
        model = MODELS[name]()
    assert all(p.is_meta for p in model.parameters())
    materialize(model, "cpu")
    assert all(torch.equal(b, c) for b, c in zip(ordinary.buffers(), model.buffers(), strict=True))
    for (key, p), (other, q) in zip(ordinary.named_parameters(), model.named_parameters(), strict=True):
        assert (key, p.shape, p.stride(), p.dtype, p.requires_grad) == (other, q.shape, q.stride(), q.dtype, q.requires_grad)
        assert type(q) is nn.Parameter and q.is_leaf and not hasattr(q, "init_trace")
        p, q = p.detach().double(), q.detach().double()
        if len(p.unique()) < 3 or key in ("waves", "given.weight", "freq", "rbf.freq"):
            torch.testing.assert_close(q, p, rtol=0, atol=0, msg=lambda text, key=key: f"{key}: {text}")
        elif p.numel() >= 64:
            n, spread = p.numel(), p.std().item()
            heavy = (p - p.mean()).pow(4).mean().item() / spread**4
            assert abs(p.mean() - q.mean()) < 7 * spread * math.sqrt(2 / n), key
            assert abs(q.std().item() / spread - 1) < 7 * math.sqrt(max(heavy - 1, 0.1) / 2 / n) + 1e-6, key
            zeros = 0 if key == "narrow" else (p == 0).sum()  # in bfloat16 torch 2.11 draws zeros
            assert (q == 0).sum() == zeros, key
            reach = (p - p.mean()).abs().max()
            assert 0.5 * reach < (q - q.mean()).abs().max() < 2 * reach or heavy > 5, key


def test_any_shard_has_the_elements_of_the_full_tensor_bitwise(monkeypatch: pytest.MonkeyPatch) -> None:
    full, r = values(build_and_materialize()), random.Random(5)
    for length in (init_trace._CHUNK, 50):  # chunks with any start
        monkeypatch.setattr(init_trace, "_CHUNK", length)
        for _ in range(4):
            model = build()
            ranges = {name: random_ranges(p.shape, r) for name, p in model.named_parameters()}
            for name, parameter in model.named_parameters():
                set_shard(parameter, ranges[name])
            for name, parameter in materialize(model, "cpu").named_parameters():
                assert torch.equal(parameter, take_ranges(full[name], ranges[name])), (name, ranges[name])


def test_random_elements_depend_on_name_seed_and_index_alone() -> None:
    full, other, state = values(build_and_materialize()), values(build_and_materialize(seed=2)), torch.get_rng_state()
    again = values(build_and_materialize(seed=2))
    assert torch.equal(torch.get_rng_state(), state), "no global generator is used"
    assert all(torch.equal(x, other[name]) for name, x in again.items())
    inner = build_and_materialize(lambda: nn.ModuleDict({"a": Everything()}))
    save_tensors = build()
    record_names(save_tensors)
    outer = materialize(nn.ModuleDict({"a": save_tensors}), "cpu")
    for name in RANDOM:
        assert not torch.equal(other[name], full[name]), f"{name} does not depend on the seed"
        assert not torch.equal(inner.get_parameter(f"a.{name}"), full[name]), f"{name} does not depend on its name"
        assert torch.equal(outer.get_parameter(f"a.{name}"), full[name]), f"{name} forgets its recorded name"
    assert not torch.equal(full["attention.in_proj_weight"][:12], full["attention.in_proj_weight"][12:24])


def test_shared_parameters_stay_shared_and_attributes_stay() -> None:
    model = build()
    shared = nn.Parameter(torch.empty(3))
    with deferred(1):
        model.first, model.second = nn.ParameterList([shared]), nn.ParameterList([shared])
    model.wide.sum_axes = ("depth",)
    model.batch.running_mean.shard_spec = "here"
    materialize(model, "cpu", dtype=torch.float64)
    assert model.tied.weight is model.uniform.weight and model.first[0] is model.second[0] and model.wide.sum_axes == ("depth",)
    assert model.batch.running_mean.shard_spec == "here" and model.batch.running_mean.dtype == torch.float64
    assert model.memory._flat_weights[0] is model.memory.weight_ih_l0
    model.wide.sum().backward()
    assert model.wide.grad is not None and not model.frozen.requires_grad


class Twins(nn.Module):
    """A model whose layers copy weights of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.target, self.online, self.copied = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(6, 5)
        self.target.load_state_dict(self.online.state_dict())
        self.copied.weight.data.copy_(self.online.weight.data)
        self.online.bias.data.zero_()
        self.online.weight.data.mul_(2)
        bias = torch.ones(5)
        self.copied.bias.data.copy_(bias)
        bias.zero_()


def test_a_copied_parameter_has_the_elements_of_its_source_at_that_time() -> None:
    model = build_and_materialize(Twins)
    assert torch.equal(model.target.weight * 2, model.online.weight) and torch.equal(model.copied.weight, model.target.weight)
    assert model.copied.bias.eq(1).all() and model.target.bias.std() > 0 and not model.online.bias.any()


# ---- memory


def run_limited(work: Callable[[], Any], max_bytes: int, pipe: Any) -> None:
    ctypes.CDLL(None).mallopt(-3, 1 << 17)  # M_MMAP_THRESHOLD: freed tensors return to the system, and are not split
    data = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (data + max_bytes, resource.RLIM_INFINITY))
    try:
        work()
        pipe.send("enough")
    except BaseException as error:
        pipe.send(repr(error))


def outcome(work: Callable[[], Any], max_bytes: int) -> str:
    """Return the outcome of ``work`` in a forked child with at most ``max_bytes`` of memory."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=run_limited, args=(work, max_bytes, sender))
    child.start()
    sender.close()
    result = receiver.recv()
    child.join()
    return str(result)


def measure_memory() -> list[str]:
    def deep(layers: int = 384) -> nn.Module:
        return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(layers)))  # 384 MiB

    def shard(layers: int = 384) -> None:
        model = build(lambda: deep(layers))
        for k, layer in enumerate(model):
            shard_(layer.weight, k % 2, Axis("tensor", 4, 1))
        materialize(model, "cpu")

    def initial_values() -> None:
        build_and_materialize(lambda: nn.ParameterList(torch.ones(1 << 18) for _ in range(96)))

    torch.set_num_threads(1)
    shard(4)  # imports and allocations of a first call
    max_bytes = int(1.1 * (96 << 20))
    return [outcome(lambda: build(deep), 16 << 20), *(outcome(work, max_bytes) for work in (shard, initial_values, deep))]


@pytest.mark.slow
def test_a_model_larger_than_memory_is_built_sharded_and_materialized() -> None:
    """Measured in a new interpreter: forks of a large one have free memory left."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as new:
        built, shared, own, full = new.submit(measure_memory).result(timeout=120)
    assert built == "enough", "during construction"
    assert shared == "enough"
    assert own == "enough", "initial values are stored once"
    assert "memory" in full, "too little memory is detected"


# ---- errors


class Reading(nn.Module):
    def __init__(self, read: Callable[[nn.Linear], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.result = read(self.linear)


READS: dict[str, Callable[[nn.Linear], Any]] = {
    "std": lambda layer: layer.weight.detach().std(),
    "mul": lambda layer: layer.weight * 2,
    "copy_": lambda layer: torch.zeros(3, 3).copy_(layer.weight.detach()),
}


@pytest.mark.parametrize("name", READS)
def test_reading_the_elements_raises_with_the_line_of_the_caller(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"aten.{name} at \S*test_deferred_init.py:\d+ \(.*\) reads the elements of a parameter"):
        build(lambda: Reading(READS[name]))


def test_tensors_that_cannot_be_materialized_raise_with_their_name() -> None:
    with pytest.raises(ConfigError, match="buffer result is on the meta device"):
        build_and_materialize(lambda: Reading(lambda layer: nn.Buffer(layer.weight.detach().clone())))
    model = build(lambda: nn.Linear(3, 3))
    nn.init.zeros_(model.bias)
    with pytest.raises(ConfigError, match="parameter bias was written between deferred and materialize"):
        materialize(model, "cpu")
    with pytest.raises(ConfigError, match=r"parameter 0.weight is on the meta device, but not of deferred \(a deepcopy is not\)"):
        materialize(nn.Sequential(copy.deepcopy(build(lambda: nn.Linear(3, 3)))), "cpu")


# ---- from files


def save_tensors(folder: Path, parts: int = 1) -> dict[str, Tensor]:
    """Save other elements in one file or in several, and return them."""
    torch.manual_seed(3)
    state = {name: torch.randn_like(x) if x.is_floating_point() else x + 7 for name, x in Everything().state_dict().items()}
    state.pop("tied.weight")
    shards = [dict(list(state.items())[part::parts]) for part in range(parts)]
    names = ["model.safetensors"] if parts == 1 else [f"model-{part}.safetensors" for part in range(parts)]
    for name, tensors in zip(names, shards):
        save_file({key: x.contiguous() for key, x in tensors.items()}, folder / name)
    if parts > 1:
        weight_map = {key: name for name, tensors in zip(names, shards) for key in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return state


@pytest.mark.parametrize("parts", [1, 3])
def test_deferred_weights_are_those_of_the_files_sharded_or_full(tmp_path: Path, parts: int) -> None:
    state, model, r = save_tensors(tmp_path, parts), build(), random.Random(1)
    source = tmp_path / "model.safetensors" if parts == 1 else tmp_path
    ranges = {name: random_ranges(p.shape, r) for name, p in model.named_parameters()}
    read_on_materialize(model, source)
    full = materialize(model, "cpu").state_dict()
    assert torch.equal(full.pop("tied.weight"), state["uniform.weight"])
    for name, x in full.items():
        assert torch.equal(x, state[name]), name
    model = build()
    for name, parameter in model.named_parameters():
        set_shard(parameter, ranges[name])
    read_on_materialize(model, source)
    assert all(p.is_meta for p in model.parameters())
    for name, x in materialize(model, "cpu").named_parameters():
        assert torch.equal(x, take_ranges(state[name], ranges[name])), name


def test_files_that_do_not_fit_raise_before_anything_is_read(tmp_path: Path) -> None:
    state, model = save_tensors(tmp_path), build()
    file, before = tmp_path / "model.safetensors", model.batch.running_mean.clone()
    with pytest.raises(CheckpointError, match=r"weights of this Everything: normal is missing; .* and \d+ more$") as error:
        save_file({"other": torch.zeros(1)}, file)
        read_on_materialize(model, file)
    assert str(error.value).count("is missing") == 10
    state["wide"] = state["wide"].T.contiguous()
    save_file({key: x.contiguous() for key, x in state.items()}, file)
    with pytest.raises(CheckpointError, match=r"wide is \[9, 31\], expected \[31, 9\]$"):
        read_on_materialize(model, file)
    assert torch.equal(model.batch.running_mean, before)
