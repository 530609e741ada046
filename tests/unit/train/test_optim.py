"""Optimizer updates equal their formulas in float64."""

import pytest
import torch
from torch import nn

from hpcai import dist
from hpcai.errors import ConfigError
from hpcai.parallel.data_parallel import GradientReducer
from hpcai.settings import StepConfig
from hpcai.train.muon import orthogonalize
from hpcai.train.optim import Optimizer, match_names

RATES = [0.0, 0.05, 0.1, 0.1, 0.025, 0.0, 0.01]


def build_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(2, 3, 3), nn.Linear(4, 3)).double().to(memory_format=torch.channels_last_3d)


def make_gradients(model: nn.Module, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator)) for p in model.parameters()]


def new_optimizer(model: nn.Module, cfg: StepConfig) -> Optimizer:
    alone = dist.single_process(torch.device("cpu"))
    reducer = GradientReducer(model, alone, decays=match_names(model, cfg), matrices=match_names(model, cfg, "muon_names"))
    return Optimizer(reducer.flat_parameters, cfg)


def train(cfg: StepConfig) -> nn.Module:
    model = build_network()
    optimizer = new_optimizer(model, cfg)
    for step, lr in enumerate(RATES):
        for p, g in zip(model.parameters(), make_gradients(model, step)):
            p.grad = g
        optimizer.lr.fill_(lr)
        optimizer.step(None, torch.tensor(0.0))
    return model


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("lr_in_momentum", [True, False])
def test_sgd_with_the_learning_rate_inside_or_outside_the_momentum(lr_in_momentum: bool, nesterov: bool) -> None:
    decay = 0.02
    settings = {"lr_in_momentum": lr_in_momentum, "nesterov": nesterov, "weight_decay": decay, "decay_names": ("1.weight",)}
    trained = train(StepConfig(optimizer="sgd", lr=0.1, momentum=0.9, **settings))
    model = build_network()
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    with torch.no_grad():
        for step, lr in enumerate(RATES):
            for (name, p), g, v in zip(model.named_parameters(), make_gradients(model, step), velocity):
                g = g + decay * p if name == "1.weight" else g
                v.mul_(0.9).add_(lr * g if lr_in_momentum else g)
                update = (lr * g if lr_in_momentum else g) + 0.9 * v if nesterov else v
                p.sub_(update if lr_in_momentum else lr * update)
    for p, expected in zip(trained.parameters(), model.parameters()):
        torch.testing.assert_close(p, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("kind", "torch_class"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)])
def test_weight_decay_is_coupled_or_decoupled_as_in_torch(kind: str, torch_class: type[torch.optim.Adam]) -> None:
    settings = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    trained, model = train(StepConfig(optimizer=kind, decay_names=("*",), **settings)), build_network()
    optimizer = torch_class(model.parameters(), **settings)
    for step, lr in enumerate(RATES):
        for p, g in zip(model.parameters(), make_gradients(model, step)):
            p.grad = g
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    for p, expected in zip(trained.parameters(), model.parameters()):
        torch.testing.assert_close(p, expected, rtol=1e-10, atol=1e-12)


def test_bf16_moments_are_rounded_with_other_random_bits_in_each_step() -> None:
    """Equal bits in all steps would round the same elements up each time."""
    model, seeds = build_network(), []
    optimizer = new_optimizer(model, StepConfig(optimizer="adamw", moments="bf16"))
    for step in range(3):
        for p, g in zip(model.parameters(), make_gradients(model, step)):
            p.grad = g
        optimizer.step(None, torch.tensor(float(step == 1)))  # the second is skipped
        seeds.append(int(optimizer._seed))
    assert seeds == [1, 1, 2]


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"step.decay_names: 'dense9.\*' matches no parameter; the model has 0.weight, 0.bias"):
        new_optimizer(build_network(), StepConfig(weight_decay=0.1, decay_names=("0.weight", "dense9.*")))
    with pytest.raises(ConfigError, match=r"step.muon_names: '0.\*' matches no matrix; the model has 1.weight"):
        new_optimizer(build_network(), StepConfig(optimizer="muon", muon_names=("0.*",)))


@pytest.mark.parametrize("kind", ["lamb", "lars"])
def test_rates_are_adapted_only_for_the_parameters_that_decay_names_matches(kind: str) -> None:
    """LAMB without adaptation is AdamW without decay; LARS without it is SGD."""
    cfg = StepConfig(optimizer=kind, lr=0.1, decay_names=("0.weight",))
    plain = StepConfig(optimizer="adamw" if kind == "lamb" else "sgd", lr=0.1)
    trained, expected = train(cfg), train(plain)
    for (name, p), q in zip(trained.named_parameters(), expected.parameters()):
        assert torch.allclose(p, q, rtol=1e-9) == (name != "0.weight"), name


@pytest.mark.parametrize("shape", [(2, 5, 3), (1, 3, 7), (3, 4, 4)], ids=str)
def test_orthogonalization_is_its_polynomial_of_the_singular_values(shape: tuple[int, int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).double()
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    s = s / s.square().sum(-1, keepdim=True).sqrt()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    torch.testing.assert_close(orthogonalize(x), u * s[:, None] @ vh, rtol=0, atol=1e-12)
    assert not orthogonalize(torch.zeros(shape)).any()


def test_muon_updates_matrices_as_torch_and_all_else_by_adamw() -> None:
    """torch orthogonalizes in bfloat16."""
    settings = {"lr": 0.1, "weight_decay": 0.1}
    trained = train(StepConfig(optimizer="muon", muon_names=("*.weight",), decay_names=("1.*",), **settings))
    adamw = train(StepConfig(optimizer="adamw", decay_names=("1.*",), **settings))
    weight = build_network()[1].weight  # the other weight, of a convolution, is no matrix
    before = weight.detach().clone()
    peer = torch.optim.Muon([weight], momentum=0.95, adjust_lr_fn="match_rms_adamw", **settings)
    for step, lr in enumerate(RATES):
        weight.grad = make_gradients(build_network(), step)[2]
        peer.param_groups[0]["lr"] = lr
        peer.step()
    for (name, p), expected in zip(trained.named_parameters(), adamw.parameters()):
        assert torch.equal(p, expected) == (name != "1.weight"), name
    torch.testing.assert_close(trained[1].weight - before, weight - before, rtol=0, atol=0.02 * (weight - before).norm().item())
