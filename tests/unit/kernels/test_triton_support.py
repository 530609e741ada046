"""The requirements of Triton are checked before the first launch; without them the references run."""

import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hpcai.kernels import triton_support
from hpcai.settings import StepConfig
from hpcai.train.auto_settings import set_backend_flags
from tests.reference_data import load_json


def with_headers(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(folder)})


@pytest.mark.parametrize("triton, compiler, cc, headers, message", load_json("refused/triton"))
def test_a_missing_requirement_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, triton: bool, compiler: str,
                                        cc: str | None, headers: bool, message: str) -> None:  # fmt: skip
    with_headers(monkeypatch, tmp_path)
    if not headers:
        (tmp_path / "Python.h").unlink()
    monkeypatch.setattr(triton_support.shutil, "which", lambda name: name if name == compiler else None)
    monkeypatch.setattr(triton_support, "find_spec", lambda name: triton or None)
    monkeypatch.setenv("CC", cc) if cc else monkeypatch.delenv("CC", raising=False)
    assert message in (triton_support.missing_requirement() or "")


def test_without_triton_a_gpu_runs_the_references_and_a_run_logs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu, on_cpu = SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)
    monkeypatch.setattr(triton_support, "MISSING", None)
    assert triton_support.is_supported(on_gpu) and not triton_support.is_supported(on_cpu)
    assert not set_backend_flags(StepConfig(), torch.device("cuda"))
    monkeypatch.setattr(triton_support, "MISSING", "there is no gcc")
    assert not triton_support.is_supported(on_gpu)
    assert set_backend_flags(StepConfig(), torch.device("cuda")) == ["kernels: torch operations, which are slower: there is no gcc"]
    assert not set_backend_flags(StepConfig(), torch.device("cpu"))
