"""Discovery of apps and their modules without imports of other apps."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import apps
import hpcai
from hpcai.cli.apps import find_module, with_part


def test_apps_are_listed_by_the_file_they_have_and_none_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is an app if it is a package and its name an identifier."""
    for name in ("one", "two", "an-app", "plain"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trick.py").write_text("FOUND = 1" if name == "one" else "raise RuntimeError")
        if name != "plain":
            (tmp_path / name / "__init__.py").write_text("" if name == "one" else "raise RuntimeError")
    monkeypatch.setattr(apps, "__path__", [*apps.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    assert with_part("trick") == ["one", "two"] and with_part("nothing") == []
    assert not any(module.startswith(("apps.one", "apps.two")) for module in sys.modules)
    trick = find_module("one", "trick")
    assert trick is not None and trick.FOUND == 1
    for name in ("cosmoflow", "an-app", "plain", "nobody", "one.trick", "../one", "", "os"):
        assert find_module(name, "trick") is None
    for module in ("apps.one", "apps.one.trick"):
        del sys.modules[module]


def test_the_apps_of_the_checkout_are_found_from_anywhere(tmp_path: Path) -> None:
    """``sys.path`` of an installed command lacks the checkout and, at first, the current folder."""
    root = Path(hpcai.__file__).parents[1]
    code = f"import sys; sys.path.insert(0, {str(root)!r}); import hpcai, hpcai.cli.apps as apps; sys.path.remove({str(root)!r})\n"
    code += "sys.path[:] = filter(None, sys.path); print(apps.with_part('settings')); print(len(sys.path) == len(set(sys.path)))"
    process = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=tmp_path, env={})
    assert process.stdout.splitlines() == [str(with_part("settings")), "True"], process.stderr
    assert "cosmoflow" in process.stdout
