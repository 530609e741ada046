"""Compilation in place: keys and values stay, compilations are counted, and compiled code is cached."""

import fcntl
import os
from pathlib import Path

import pytest
import torch
import torch._dynamo.convert_frame
from torch import Tensor, nn

from hpcai.errors import ConfigError
from hpcai.models.cosmoflow import CosmoFlow, CosmoFlowConfig
from hpcai.train import compiling
from hpcai.train.compiling import CompileCounts, cache_key, compile_model, repeated_blocks, restore_cache, store_cache

NOTHING = "compiled 0 graphs in 0.0 s, 0 graph breaks, 0 recompiles"


class Block(nn.Module):
    def __init__(self, width: int = 8, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.layer, self.inner = nn.Linear(width, width), inner or nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.layer(x))


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.body = nn.ModuleList(blocks or [Block() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.body:
            x = block(x)
        return x


class Prints(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        print("", end="")
        return x * x.sum().item()


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 8
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "one"))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)


def test_blocks_are_the_outermost_repeated_children_and_never_torchs_layers() -> None:
    nests = Model(Block(inner=nn.Sequential(Block(), Block())), Block())
    stages = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))
    small = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    lists = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block()])])
    lists.append(nn.ModuleList(list(lists[0])))  # the same blocks again: weights are shared
    cosmoflow = CosmoFlow(CosmoFlowConfig(size=32, blocks=5, filters=2))
    for model, expected in (
        (nests, nests.body), (stages, [*stages[0], *stages[1]]), (small, small), (lists, lists[0]),
        (cosmoflow, cosmoflow.conv_seq), (Model(Block(), nn.Linear(8, 8), nn.Linear(8, 8)), []), (nn.Linear(8, 8), []),
    ):  # fmt: skip
        assert repeated_blocks(model) == list(expected)


@pytest.mark.parametrize(("mode", "count"), [("none", 0), ("blocks", 4), ("whole", 1)])
def test_keys_values_and_gradients_stay_and_equal_blocks_are_compiled_once(mode: str, count: int) -> None:
    model, x, counts = Model().double(), torch.randn(5, 8, dtype=torch.float64), CompileCounts()
    keys, expected = list(model.state_dict()), model(x)
    gradients = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    assert compile_model(model, mode, backend="aot_eager") == count  # type: ignore[arg-type]
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(torch.autograd.grad(model(x).square().sum(), list(model.parameters())), gradients)
    read = counts.read()
    assert list(model.state_dict()) == keys
    assert read["graphs"] == min(count, 1) and read["graph_breaks"] == read["recompiles"] == read["over_limit"] == 0
    assert (read["seconds"] > 0) == (count > 0)


def test_many_kinds_of_a_block_are_all_compiled_and_a_model_without_blocks_is_refused() -> None:
    widths = [8, 16, 24, 8, 32, 40, 48, 56, 64, 72, 80]
    model, counts = nn.ModuleList([Block(width) for width in widths]), CompileCounts()
    assert compile_model(model, "blocks", backend="eager") == len(widths)
    for width, block in zip(widths, model):
        block(torch.randn(2, width))
    assert counts.read()["graphs"] == len(set(widths)) and counts.read()["over_limit"] == 0 and counts.read()["seconds"] > 0
    with pytest.raises(ConfigError, match="Linear has no repeated blocks.*set compile: whole"):
        compile_model(nn.Linear(2, 2), "blocks")


def test_a_missing_compiler_is_refused_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-compiler")
    with pytest.raises(ConfigError, match="step.compile is whole, but there is no no-compiler, .* set it to none"):
        compile_model(nn.Linear(1, 1), "whole")


def test_graph_breaks_are_counted_with_their_reasons() -> None:
    model, counts = nn.Sequential(Prints()), CompileCounts()
    compile_model(model, "whole", backend="eager")
    model(torch.ones(3))
    read = counts.read()
    breaks = read["graph_breaks"]  # two; torch 2.14 counts the first one twice
    assert breaks == sum(read["reasons"].values()) in (2, 3) and f"{breaks} graph breaks" in counts.describe()
    assert any("print" in reason for reason in read["reasons"]) and any("item()" in reason for reason in read["reasons"])
    assert "Hint" not in counts.describe() and CompileCounts().describe() == NOTHING


def test_recompiles_are_counted_with_their_reasons_and_so_is_giving_up() -> None:
    model, counts = Model(), CompileCounts()
    compile_model(model, "whole", backend="eager")
    model(torch.randn(2, 8))
    later = CompileCounts()
    model(torch.randn(2, 8))
    assert later.describe() == NOTHING
    model(torch.randn(3, 8))
    assert counts.read()["recompiles"] == later.read()["recompiles"] == 1
    assert counts.describe().startswith("compiled 2 graphs in ") and "1 recompiles; 1 x tensor 'x' size" in counts.describe()
    for rows in range(4, 20):
        model(torch.randn(rows, 8))
    assert counts.read()["over_limit"] == 1 and "given up" in counts.describe()
    dynamic, counts = Model(), CompileCounts()
    compile_model(dynamic, "blocks", dynamic=True, backend="eager")
    for rows in (2, 3, 4):
        dynamic(torch.randn(rows, 8))
    assert counts.read()["recompiles"] == 0 and counts.read()["graphs"] == 1


def test_the_key_names_settings_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    key = cache_key({"how": "blocks", "shape": (4, 8)})
    assert key == cache_key({"shape": (4, 8), "how": "blocks"}) and key.isalnum()
    keys = {key, cache_key({"how": "whole", "shape": (4, 8)}), cache_key({})}
    assert any(line.startswith(("flags", "Features")) for line in compiling._cpu_id())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    changes = (torch, "__version__", "9"), (torch.version, "cuda", "99"), (torch.cuda, "is_available", lambda: True)
    for owner, name, value in (*changes, (compiling, "_cpu_id", list)):
        monkeypatch.setattr(owner, name, value)
        keys.add(cache_key({"how": "blocks", "shape": (4, 8)}))
    assert len(keys) == 7


def cache_dir() -> Path:
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


def test_compiled_code_is_restored_on_another_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, path = tmp_path / "shared", tmp_path / "shared/k1.zip"
    assert not restore_cache(shared, "k1")
    first = cache_dir()
    assert first.is_relative_to(tmp_path / "one") and os.environ["TRITON_CACHE_DIR"] == str(first / "triton")
    assert not restore_cache(shared, "k1") and cache_dir() == first  # again in the same process
    for name in ("ab/x.so", "ab/.123.tmp", "ab/busy.main.so", "locks/x.lock", "locks/busy.lock"):
        (first / name).parent.mkdir(exist_ok=True)
        (first / name).write_text("code")
    with open(first / "locks/busy.lock", "rb") as lock:  # g++ is at work
        fcntl.flock(lock, fcntl.LOCK_EX)
        store_cache(shared, "k1")
        before = path.stat().st_mtime_ns
        store_cache(shared, "k1")
    assert path.stat().st_mtime_ns == before and list(shared.iterdir()) == [path]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "two"))
    assert restore_cache(shared, "k1") and cache_dir().is_relative_to(tmp_path / "two")
    assert {str(p.relative_to(cache_dir())): p.read_text() for p in cache_dir().rglob("*") if p.is_file()} == {"ab/x.so": "code"}
    (cache_dir() / "ab/x.so").write_text("co")  # left by a job that was killed
    assert restore_cache(shared, "k1") and (cache_dir() / "ab/x.so").read_text() == "code"
    assert not restore_cache(shared, "k2") and not list(cache_dir().iterdir())
    (cache_dir() / "y.so").write_text("other")
    store_cache(shared, "k1")  # this process uses another key
    assert path.stat().st_mtime_ns == before


@pytest.mark.parametrize("kind", ["flipped", "foreign", "other user", "open"])
def test_a_damaged_or_foreign_archive_is_ignored_with_a_reason_and_written_anew(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, path = tmp_path / "shared", tmp_path / "shared/k.zip"
    restore_cache(shared, "other" if kind == "foreign" else "k")
    (cache_dir() / "x.so").write_bytes(code := os.urandom(5000))
    store_cache(shared, cache_dir().name)
    (cache_dir() / "x.so").unlink()
    content = next(shared.iterdir()).read_bytes()
    path.write_bytes(content[:900] + b"??" + content[902:] if kind == "flipped" else content)
    if kind == "open":
        path.chmod(0o770)
    with monkeypatch.context() as patch:
        if kind == "other user":
            os.chown(path, 12345, -1) if os.getuid() == 0 else patch.setattr(os, "getuid", lambda: 12345)
        assert not restore_cache(shared, "k")
    assert f"{path} is not used: " in caplog.text and not list(cache_dir().iterdir())
    (cache_dir() / "x.so").write_bytes(code)
    store_cache(shared, "k")
    assert restore_cache(shared, "k")


@pytest.mark.parametrize("kind", ["link", "open", "below"])
def test_a_folder_of_this_node_that_others_can_write_is_not_used(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = cache_dir()
    folder = before / f"hpcai-compiled-{os.getuid()}"
    (target := tmp_path / "target").mkdir()
    folder.parent.mkdir(parents=True, exist_ok=True)
    if kind == "link":
        folder.symlink_to(target)
    else:
        folder.mkdir(mode=0o700)
        (folder if kind == "open" else folder.parent).chmod(0o777)
    assert not restore_cache(tmp_path / "shared", "k") and str(folder) in caplog.text
    assert cache_dir() == before and not [*target.iterdir(), *folder.iterdir()]
    if kind == "below":
        folder.parent.chmod(0o1777)
        restore_cache(tmp_path / "shared", "k")
        assert cache_dir() == folder / "k", "in a sticky folder others cannot replace it"
