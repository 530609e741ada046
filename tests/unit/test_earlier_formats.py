"""Files of earlier versions (tests/data/formats) work, or are refused with a message that says what to do."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from data_prep import cosmoflow, text
from hpcai import dist
from hpcai.cli.checkpoint import show
from hpcai.cli.report import read_run
from hpcai.errors import CheckpointError
from hpcai.models.diffusion import Diffusion
from hpcai.settings import CheckpointConfig, RunConfig, StepConfig
from hpcai.train import Step
from hpcai.train.checkpoint import Checkpoints
from hpcai.train.flight_recorder import read_bundle

FORMATS = Path(__file__).parents[1] / "data/formats"


def open_checkpoints(number):
    """Return the step of the run that wrote checkpoints, before its start, and the checkpoints."""
    torch.manual_seed(0)
    mesh, adamw = dist.single_process(), StepConfig(optimizer="adamw", ema_decay=0.9, lr=0.125)
    step = Step(torch.nn.Linear(2, 1), lambda model, batch: {"loss": model(batch).square().mean()}, adamw, mesh)
    settings = {"step": {"ema_decay": 0.9, "lr": 0.125}, "train": {"replica_check_every": 100}}
    return step, Checkpoints(FORMATS / f"checkpoint-{number}", CheckpointConfig(), mesh, settings, schema=RunConfig)


def test_a_checkpoint_of_another_format_is_refused_and_not_called_damaged(capsys):
    message = "is a checkpoint of format 2, expected 3; resume the run with the hpcai that wrote it"
    step, saved = open_checkpoints(2)
    with pytest.raises(CheckpointError, match=f"step-00000003: {message}$"):
        saved.resume(step)
    assert show(FORMATS / "checkpoint-2") == 1 and message in capsys.readouterr().out


def test_a_checkpoint_of_format_3_with_earlier_names_of_settings_is_resumed():
    (resumed, saved), (trained, _) = open_checkpoints(3), open_checkpoints(3)
    assert saved.resume(resumed).seen == 44 and not [text for text in saved.messages if text.startswith(("step", "train"))]
    for n in range(3):
        trained(torch.tensor([[1.0 + n, 2.0]]))
    for part in (lambda s: s.model.state_dict(), lambda s: s.optimizer.state(), lambda s: s.average.state()):
        torch.testing.assert_close(part(resumed), part(trained))


def test_weights_a_run_and_a_bundle_of_a_failed_run_are_read():
    cfg = Diffusion.load(FORMATS / "weights-1/model.safetensors").cfg
    assert (cfg.objective.prediction_type, cfg.sampler.batch_guidance) == ("epsilon", False)
    assert read_run(FORMATS / "run-1").best("mae") == (14, pytest.approx(0.6428, abs=1e-4))
    (report,) = read_bundle(FORMATS / "failure-1")
    assert report["settings"]["step"]["lr"] == 1e30


def test_a_data_folder_is_extended_with_earlier_files_kept(tmp_path):
    folder = shutil.copytree(FORMATS / "data-1", tmp_path / "data")
    args = "--universes 4 --size 8 --cut 1 --voxel 32 --particles-per-cell 1 --redshifts 0 --validation 0.5 --workers 1 --no-check"
    earlier = (folder / "train/universe_000000.h5").stat()
    assert cosmoflow.main(["simulate", str(folder), *args.split()]) == 0
    assert (folder / "train/universe_000000.h5").stat().st_mtime_ns == earlier.st_mtime_ns
    assert json.loads((folder / "statistics.json").read_text())["splits"]["train"]["rows"] == 2


def test_tokens_of_an_earlier_conversion_are_not_read(tmp_path):
    (tmp_path / "source.txt").write_text("A line of text.\n" * 40)
    shutil.copytree(FORMATS / "tokens-1", tmp_path / "out/.work")
    args = ["convert", str(tmp_path / "source.txt"), str(tmp_path / "out"), "--tokenizer", "bytes", "--sequence", "32"]
    assert text.main([*args, "--workers", "1"]) == 0 == text.main(["check", str(tmp_path / "out")])
