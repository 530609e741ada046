"""What Triton needs of a machine is found out before anything is launched; without it the plain twins run."""

import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hpcai.kernels import triton_support
from hpcai.settings import StepConfig
from hpcai.train.auto_settings import set_backend_flags


def with_headers(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(folder)})


@pytest.mark.parametrize(
    "triton, found, named, headers, says",
    [
        (False, "gcc", None, True, "Triton is not installed"),
        (True, "", None, True, "no gcc and no clang, and Triton needs a C compiler"),
        (True, "gcc", "/nowhere/cc", True, "CC=/nowhere/cc is no program"),
        (True, "clang", None, False, "Python.h, which Triton compiles against"),
    ],
)
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, triton: bool, found: str, named: str | None,
                                  headers: bool, says: str) -> None:  # fmt: skip
    with_headers(monkeypatch, tmp_path)
    if not headers:
        (tmp_path / "Python.h").unlink()
    monkeypatch.setattr(triton_support.shutil, "which", lambda name: name if name == found else None)
    monkeypatch.setattr(triton_support, "find_spec", lambda name: triton or None)
    monkeypatch.setenv("CC", named) if named else monkeypatch.delenv("CC", raising=False)
    assert says in (triton_support.missing_requirement() or "")


def test_without_it_a_gpu_takes_the_twins_and_a_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu, on_cpu = SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)
    monkeypatch.setattr(triton_support, "MISSING", None)
    assert triton_support.is_supported(on_gpu) and not triton_support.is_supported(on_cpu)
    assert not set_backend_flags(StepConfig(), torch.device("cuda"))
    monkeypatch.setattr(triton_support, "MISSING", "there is no gcc")
    assert not triton_support.is_supported(on_gpu)
    assert set_backend_flags(StepConfig(), torch.device("cuda")) == ["kernels: torch operations, which are slower: there is no gcc"]
    assert not set_backend_flags(StepConfig(), torch.device("cpu"))
