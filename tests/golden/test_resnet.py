"""ResNet, LARS and its schedule agree with stored results of the reference implementations (tests/data/resnet50)."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai import dist, train
from hpcai.errors import CheckpointError
from hpcai.models.resnet import Batch, ResNet, ResNetConfig, calibration_error, fit_temperature, score
from hpcai.settings import ScheduleConfig, StepConfig
from hpcai.train.metrics import MetricSums
from hpcai.train.schedule import make_lr_schedule
from tests.reference_data import DATA, load_json, load_tensors

TINY = DATA / "resnet50/model.safetensors"


def read(name: str) -> Any:
    return load_json(f"resnet50/{name}")


def load_tiny() -> tuple[ResNet, dict[str, Tensor]]:
    """Return the stored network in float64, and its input and outputs."""
    return ResNet.load(TINY).double(), load_tensors("resnet50/tiny")


def smoothed_loss(model: Any, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return {"loss": F.cross_entropy(model(batch[0]), batch[1], label_smoothing=model.cfg.label_smoothing)}


def test_outputs_statistics_losses_and_gradients_are_those_of_the_reference() -> None:
    (model, stored), case = load_tiny(), read("tiny")
    assert (model.cfg.layers, model.cfg.base_width, model.cfg.outputs) == ((3, 4, 6, 3), 4, 10)
    x, labels = stored["input"], stored["labels"].long()
    close = {"rtol": 0.0, "atol": 1e-9}
    with torch.no_grad():
        torch.testing.assert_close(model(x), stored["eval_f64"], **close)
        assert smoothed_loss(model, (x, labels))["loss"].item() == pytest.approx(case["eval_loss_smoothed"], abs=1e-10)
        wide = ResNet.load(TINY)(x.float())
        torch.testing.assert_close(wide.double(), stored["eval_f64"], rtol=0, atol=5e-5)
    logits = model.train()(x)
    torch.testing.assert_close(logits, stored["train_f64"], **close)
    loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
    assert loss.item() == pytest.approx(case["loss_smoothed"], abs=1e-10)
    loss.backward()
    gradients = {name: p.grad.norm().item() for name, p in model.named_parameters() if p.grad is not None}
    assert gradients == pytest.approx(case["grad_l2"], rel=1e-7)
    statistics = {name.removeprefix("after/"): value for name, value in stored.items() if name.startswith("after/")}
    state = model.state_dict()
    assert len(statistics) == 106
    for name, value in statistics.items():
        torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), stored["eval_after_train_forward_f64"], **close)


def test_three_steps_of_lars_with_the_network() -> None:
    (model, stored), case = load_tiny(), read("tiny")["lars"]
    layers = ("*conv*.weight", "*downsample.0.weight", "fc.weight")
    cfg = StepConfig(
        optimizer="lars", momentum=case["momentum"], weight_decay=case["weight_decay"], trust=case["eta"], decay_names=layers,
        precision="fp64",
    )  # fmt: skip
    step, batch = train.Step(model.train(), smoothed_loss, cfg, dist.single_process()), (stored["input"], stored["labels"].long())
    losses = [step(batch, lr)["loss"].item() for lr in case["lr"]]
    assert losses == pytest.approx(case["losses"][:3], rel=1e-8)
    norms = {name: p.detach().norm().item() for name, p in model.named_parameters()}
    assert norms == pytest.approx(case["param_l2_after_3"], rel=1e-8)


def test_lars_alone() -> None:
    stored = load_tensors("resnet50/lars")
    names = [name.removeprefix("p0/") for name in stored if name.startswith("p0/")]
    adapted = [name for name in names if name not in ("bn.weight", "bn.bias", "fc.bias")]
    model = nn.Module()
    for name in names:
        module = model
        *path, last = name.split(".")
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(stored[f"p0/{name}"].clone()))
    cfg = StepConfig(
        optimizer="lars", momentum=0.9, weight_decay=5e-5, trust=1e-3, decay_names=tuple(adapted), precision="fp64"
    )  # fmt: skip

    def product(model: Any, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": sum((p * gradients[name][0]).sum() for name, p in model.named_parameters())}  # type: ignore[dict-item]

    step = train.Step(model, product, cfg, dist.single_process())
    for number, rate in enumerate((1.0, 3.0, 2.0), 1):
        step({name: stored[f"g{number}/{name}"][None] for name in names}, rate)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), stored[f"tf/p{number}/{name}"], rtol=1e-12, atol=1e-13, msg=name)


@pytest.mark.parametrize("case", read("lr_schedule"), ids=lambda case: case["name"])
def test_the_schedule_of_mlperf(case: dict[str, Any]) -> None:
    length = case["train_steps"] - case["warmup_steps"] + 1
    cfg = ScheduleConfig(unit="steps", warmup=case["warmup_steps"], decay="polynomial", power=case["power"], length=length,
                         floor=case["end_lr"] / case["base_lr"])  # fmt: skip
    rate = make_lr_schedule(cfg, case["base_lr"], case["steps_per_epoch"], case["train_steps"])
    assert [rate(step) for step in case["steps"]] == pytest.approx(case["lr"], rel=1e-9)


def test_names_and_sizes_are_those_of_torchvision() -> None:
    names = read("names")
    with torch.device("meta"):
        model = ResNet()
    assert [[name, list(p.shape)] for name, p in model.named_parameters()] == names["parameters"]
    assert sum(p.numel() for p in model.parameters()) == names["total"] == 25_557_032
    buffers = [[name, list(b.shape)] for name, b in model.named_buffers() if name in model.state_dict()]
    assert sorted(buffers) == sorted(names["buffers"])


def test_accuracy_and_loss_of_known_logits() -> None:
    stored = load_tensors("resnet50/accuracy")
    logits, labels = stored["logits"], stored["labels"].long()

    class Known(nn.Module):
        cfg = ResNetConfig(num_classes=8)

        def normalised(self, images: Tensor) -> Tensor:
            return images

        def forward(self, x: Tensor) -> Tensor:
            return x

    sums = MetricSums()
    for rows in (slice(0, 27), slice(27, 40)):
        sums.add(score(Known(), Batch(logits[rows], labels[rows])), 1)
    result = sums.reduce(dist.single_process()["replicate"], torch.device("cpu"))
    assert result["accuracy"] == pytest.approx(stored["top1"].item()) and result["top5"] == pytest.approx(stored["top5"].item())
    assert result["loss"] == pytest.approx(F.cross_entropy(logits, labels).item())
    assert result["ece"] == pytest.approx(calibration_error(logits.softmax(1), labels))
    smooth = F.cross_entropy(logits, labels, label_smoothing=0.1, reduction="none")
    torch.testing.assert_close(smooth, stored["smoothed_loss_per_sample"], rtol=1e-12, atol=1e-12)


def test_the_temperature_of_calibrated_probabilities() -> None:
    logits = 2 * torch.randn(4000, 5, generator=torch.Generator().manual_seed(0)).double()
    labels = torch.multinomial(logits.softmax(1), 1, generator=torch.Generator().manual_seed(1))[:, 0]
    assert fit_temperature(3 * logits, labels) == pytest.approx(3, rel=0.05)
    assert calibration_error((3 * logits).softmax(1), labels) > 0.1 > 3 * calibration_error(logits.softmax(1), labels)
    best = fit_temperature(logits, labels)
    losses = [F.cross_entropy(logits / temperature, labels).item() for temperature in (best * 0.98, best, best * 1.02)]
    assert min(losses) == losses[1]


def test_weights_in_the_names_of_other_codes(tmp_path: Any) -> None:
    kinds = {"resnet18": {"block": "basic", "layers": (2, 2, 2, 2)}, "resnext": {"groups": 4, "width_per_group": 16},
             "wide": {"width_per_group": 128, "layers": (1, 2, 1, 1)}}  # fmt: skip
    x = torch.randn(2, 3, 40, 40)
    for name, changes in kinds.items():
        model = ResNet(ResNetConfig.model_validate({"base_width": 8, "num_classes": 7} | changes)).eval()
        model.save(tmp_path / f"{name}.pth", form="torchvision")
        loaded = ResNet.load(tmp_path / f"{name}.pth")
        assert loaded.cfg.model_dump(include=set(changes)) == changes and torch.equal(loaded(x), model(x))
    with pytest.raises(CheckpointError, match=r"the weights have classes 7, the settings 5"):
        ResNet.load(tmp_path / "wide.pth", ResNetConfig.model_validate({"base_width": 8, "num_classes": 5, **kinds["wide"]}))
