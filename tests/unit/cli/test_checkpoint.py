"""`hpcai checkpoint show` and `hpcai checkpoint export`."""

import json
from pathlib import Path

import pytest
import torch

from hpcai import dist
from hpcai.cli.checkpoint import main, show
from hpcai.errors import CheckpointError
from hpcai.models.cosmoflow import Batch, CosmoFlow, CosmoFlowConfig, loss
from hpcai.settings import StepConfig
from hpcai.train import Step
from hpcai.train.checkpoint_reader import Progress, read_tensors
from tests.unit.train.test_checkpoint import new_checkpoints, new_step


def test_a_run_and_one_checkpoint_are_shown_and_damage_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step, checkpoints = new_step(), new_checkpoints(tmp_path / "checkpoints", keep=2)
    for count in (3, 7):
        checkpoints.save(step, Progress(step=count, epoch=1))
    assert show(tmp_path) == 0
    text = capsys.readouterr().out
    assert "step-00000003" in text and "step-00000007" in text and text.count("whole") == 2
    assert show(tmp_path / "checkpoints/step-00000007") == 0
    text = capsys.readouterr().out
    assert "step-00000007" in text and "step-00000003" not in text

    file = tmp_path / "checkpoints/step-00000003/tensors-000.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    assert show(tmp_path) == 1
    assert "tensors-000.safetensors has changed since it was written" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="no checkpoint found"):
        show(tmp_path / "elsewhere")


@pytest.mark.parametrize("average", [None, 0.9])
def test_the_weights_of_a_checkpoint_are_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], average: float | None) -> None:
    cfg = CosmoFlowConfig(size=32, filters=2)
    step = Step(CosmoFlow(cfg), loss, StepConfig(ema_decay=average), dist.single_process())
    for count in (1, 2):
        step(Batch(torch.randint(0, 9, (2, 32, 32, 32, 4), dtype=torch.int16), torch.rand(2, 4)))
        new_checkpoints(tmp_path / "checkpoints").save(step, Progress(step=count))
    assert main(["export", str(tmp_path), str(tmp_path / "model.safetensors")]) == 0
    assert "step-00000002" in capsys.readouterr().out and not list(tmp_path.glob(".*"))
    model = CosmoFlow.load(tmp_path / "model.safetensors")
    assert model.cfg == cfg
    with step.average.applied():
        assert all(torch.equal(value, step.model.state_dict()[name]) for name, value in model.state_dict().items())


def new_finetuning_step(weights: Path, lr: float = 0.1) -> Step:
    """Return a step of loaded weights that trains only the last layer."""
    model = CosmoFlow.load(weights)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(list(dict(model.named_children()))[-2]))
    assert 0 < sum(p.requires_grad for p in model.parameters()) < len(list(model.parameters()))
    return Step(model, loss, StepConfig(lr=lr), dist.single_process())


def test_weights_that_are_not_trained_are_named_and_not_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    CosmoFlow(CosmoFlowConfig(size=32, filters=2)).save(tmp_path / "start.safetensors")
    step, checkpoints = new_finetuning_step(tmp_path / "start.safetensors"), new_checkpoints(tmp_path / "checkpoints")
    step(Batch(torch.randint(0, 9, (2, 32, 32, 32, 4), dtype=torch.int16), torch.rand(2, 4)))
    saved = checkpoints.save(step, Progress(step=1))
    frozen = {name for name, p in step.model.named_parameters() if not p.requires_grad}
    assert not {f"model/{name}" for name in frozen} & read_tensors(saved.path).keys()
    run = json.loads((saved.path / "run.json").read_text())
    assert run["frozen"].keys() == frozen and [*run["origins"].values()] == [str(tmp_path / "start.safetensors")]

    resumed = new_finetuning_step(tmp_path / "start.safetensors")
    assert new_checkpoints(tmp_path / "checkpoints").resume(resumed) == Progress(step=1)
    main(["export", str(tmp_path), str(tmp_path / "model.safetensors")])
    for model in (resumed.model, CosmoFlow.load(tmp_path / "model.safetensors")):
        assert all(torch.equal(t, step.model.state_dict()[name]) for name, t in model.state_dict().items())

    CosmoFlow(CosmoFlowConfig(size=32, filters=2)).save(tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"is not trained and was that of .*start.safetensors .*now it is that of .*other"):
        new_checkpoints(tmp_path / "checkpoints").resume(new_finetuning_step(tmp_path / "other.safetensors"))
    (tmp_path / "start.safetensors").unlink()
    with pytest.raises(CheckpointError, match="frozen weights are those of .*start.safetensors"):
        main(["export", str(tmp_path), str(tmp_path / "model.safetensors")])


def test_frozen_weights_that_were_trained_before_are_still_saved(tmp_path: Path) -> None:
    CosmoFlow(CosmoFlowConfig(size=32, filters=2)).save(tmp_path / "start.safetensors")
    old = Step(CosmoFlow.load(tmp_path / "start.safetensors"), loss, StepConfig(optimizer="sgd", momentum=0), dist.single_process())
    for parameter in old.model.parameters():
        parameter.data.add_(1.0)
    new_checkpoints(tmp_path / "checkpoints").save(old, Progress(step=1))
    checkpoints, step = new_checkpoints(tmp_path / "checkpoints"), new_finetuning_step(tmp_path / "start.safetensors")
    step = Step(step.model, loss, StepConfig(optimizer="sgd", momentum=0), dist.single_process())
    assert checkpoints.resume(step) == Progress(step=1)
    tensors = read_tensors(checkpoints.save(step, Progress(step=2)).path)
    assert all(torch.equal(tensors[f"model/{name}"], p) for name, p in old.model.named_parameters())


def test_export_errors(tmp_path: Path) -> None:
    new_checkpoints(tmp_path).save(new_step(), Progress(step=1))
    with pytest.raises(CheckpointError, match="does not name the model"):
        main(["export", str(tmp_path), str(tmp_path / "model.safetensors")])
    with pytest.raises(CheckpointError, match="no checkpoint found"):
        main(["export", str(tmp_path / "elsewhere"), "x"])
    assert not list(tmp_path.glob("*.safetensors"))
