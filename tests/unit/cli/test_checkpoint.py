"""What `hpcai checkpoint show` says, and what `hpcai checkpoint export` leaves."""

from pathlib import Path

import pytest
import torch
from rich.console import Console

from hpcai import dist
from hpcai.cli.checkpoint import main, show
from hpcai.errors import CheckpointError
from hpcai.models.cosmoflow import Batch, CosmoFlow, CosmoFlowConfig, loss
from hpcai.settings import StepConfig
from hpcai.train import Step
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


@pytest.mark.parametrize("average", [None, 0.9])
def test_the_weights_of_a_checkpoint_are_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], average: float | None) -> None:
    cfg = CosmoFlowConfig(size=32, filters=2)
    step = Step(CosmoFlow(cfg), loss, StepConfig(average=average), dist.alone())
    for count in (1, 2):
        step(Batch(torch.randint(0, 9, (2, 32, 32, 32, 4), dtype=torch.int16), torch.rand(2, 4)))
        keeper(tmp_path / "checkpoints").save(step, Progress(step=count))
    assert main(["export", str(tmp_path), str(tmp_path / "model.safetensors")]) == 0
    assert "step-00000002" in capsys.readouterr().out and not list(tmp_path.glob(".*"))
    model = CosmoFlow.load(tmp_path / "model.safetensors")
    assert model.cfg == cfg
    with step.average.applied():
        assert all(torch.equal(value, step.model.state_dict()[name]) for name, value in model.state_dict().items())


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    keeper(tmp_path).save(new_step(), Progress(step=1))
    with pytest.raises(CheckpointError, match="does not say which model"):
        main(["export", str(tmp_path), str(tmp_path / "model.safetensors")])
    with pytest.raises(CheckpointError, match="no checkpoint is there"):
        main(["export", str(tmp_path / "elsewhere"), "x"])
    assert not list(tmp_path.glob("*.safetensors"))
