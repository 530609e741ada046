"""What `hpcai checkpoint show` says."""

from pathlib import Path

import pytest
from rich.console import Console

from hpcai.cli.checkpoint import show
from hpcai.errors import CheckpointError
from hpcai.train.checkpoint import Progress
from tests.unit.train.test_checkpoint import keeper, new_step


def test_a_run_one_checkpoint_and_its_tensors_are_shown_and_damage_is_found(tmp_path: Path) -> None:
    step, kept = new_step(), keeper(tmp_path / "checkpoints", keep=2)
    for count in (3, 7):
        kept.save(step, Progress(step=count, epoch=1))
    console = Console(width=200, record=True)
    assert show(tmp_path, False, console) == 0
    text = console.export_text()
    assert "step-00000003" in text and "step-00000007" in text and text.count("whole") == 2
    assert show(tmp_path / "checkpoints/step-00000007", True, console) == 0
    text = console.export_text()
    assert "model/0.weight" in text and "[4, 2, 3, 3, 3]" in text and "tensors-000.safetensors" in text

    file = tmp_path / "checkpoints/step-00000003/tensors-000.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    assert show(tmp_path, False, console) == 1
    assert "tensors-000.safetensors has changed since it was written" in console.export_text()
    with pytest.raises(CheckpointError, match="no checkpoint is there"):
        show(tmp_path / "elsewhere", False, console)


def test_a_checkpoint_of_format_1_is_shown(tmp_path: Path) -> None:
    console = Console(width=200, record=True)
    assert show(Path(__file__).parents[2] / "data/checkpoint", True, console) == 0
    assert "__0_0.distcp" in console.export_text()
