"""Losses of alignment equal trl's, advantages small examples, and a critic is saved and loaded."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcai.errors import ConfigError, DataError
from hpcai.models import llm
from hpcai.models.llm import (
    LLM, Critic, KLConfig, KLController, LLMConfig, PolicyConfig, PreferenceBatch, PreferenceConfig, RolloutBatch, gae,
    group_advantages, kl_rewards, leave_one_out, policy_loss, preference_loss, reward_loss, token_log_probs, value_loss,
)  # fmt: skip
from tests.reference_data import DATA, load_json

TRL = load_json("llm/alignment")
SMALL: dict[str, Any] = {"vocabulary": 11, "width": 16, "layers": 1, "heads": 2, "inner": 24, "positions": 16}


class Outputs:
    """A model that returns ``output`` [B, T] as the cross entropy or value of each token."""

    training = True

    def __init__(self, output: Tensor, **cfg: Any) -> None:
        self.output, self.cfg = output, SimpleNamespace(z_loss=0.0, experts=None, **cfg)

    def __call__(self, tokens: Tensor, targets: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        return self.output if targets is None else self.output.where(targets >= 0, 0)


def double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def shifted(mask: Any) -> Tensor:
    """Return the mask [B, T + 1] of targets [B, T]."""
    return torch.nn.functional.pad(torch.tensor(mask).bool(), (1, 0))


def rollouts(**changes: Any) -> tuple[RolloutBatch, Tensor]:
    """Return the batch of the reference, and current log-probabilities."""
    inputs = TRL["policy"]["inputs"]
    old, reference, engine = (double(inputs[f"{name}_log_probs"]) for name in ("old", "reference", "engine"))
    mask, advantages = shifted(inputs["mask"]), double(inputs["advantages"])[:, None].expand(-1, 6)
    tokens = torch.zeros_like(mask, dtype=torch.int64)
    batch = RolloutBatch(tokens, mask, old, advantages, None, reference, engine)
    return batch._replace(**changes), double(inputs["log_probs"]).requires_grad_()


def check_case(case: dict[str, Any], values: dict[str, Any], inputs: Tensor, skip: tuple[str, ...] = ()) -> None:
    """Compare means and the gradient; trl's shares are float32."""
    total, count = values["loss"]
    (gradient,) = torch.autograd.grad(total / count, inputs)
    torch.testing.assert_close(gradient, double(case["gradient"]), rtol=0, atol=1e-10)
    for name in case.keys() - {"settings", "gradient", "rows", "margin", *skip}:
        mean = float(values[name][0] / values[name][1])
        assert mean == pytest.approx(case[name], rel=0, abs=1e-10 if "clipped" not in name and name != "accuracy" else 1e-6), name


@pytest.mark.parametrize("case", TRL["policy"]["cases"], ids=lambda case: str(case["settings"]))
@pytest.mark.parametrize("packed", [False, True])
def test_policy_loss_equals_trl(case: dict[str, Any], packed: bool) -> None:
    """Also for two sequences in each row, which ``documents`` tells apart."""
    batch, current = rollouts()
    if packed:
        joined = [None if x is None else x.unflatten(0, (2, 2)).flatten(1) for x in batch]
        columns = (torch.tensor([*range(1, 7), *range(8, 14)]))
        tokens, mask = (x[:, :-1] for x in joined[:2])
        documents = (torch.arange(14) // 7).expand(2, -1)
        fields = {n: x.new_zeros(2, 13).index_copy(1, columns - 1, x) for n, x in zip(batch._fields[2:], joined[2:]) if x is not None}
        batch = RolloutBatch(joined[0], joined[1], documents=documents, **fields)
        output = current.unflatten(0, (2, 2)).flatten(1)
        output = output.new_zeros(2, 13).index_copy(1, columns - 1, output)
    per_sequence = ("clipped_low", "clipped_high") if "ratio" in case["settings"] else ()
    values = policy_loss(Outputs(-(output if packed else current)), batch, PolicyConfig(**case["settings"]))
    check_case(case, values, current, per_sequence)


@pytest.mark.parametrize("case", TRL["preference"]["cases"], ids=lambda case: str(case["settings"]))
def test_preference_loss_equals_trl(case: dict[str, Any]) -> None:
    inputs, rows = TRL["preference"]["inputs"], case.get("rows", slice(None))
    mask, current = torch.tensor(inputs["loss_mask"])[rows].bool(), double(inputs["log_probs"])[rows].requires_grad_()
    batch = PreferenceBatch(torch.zeros_like(mask, dtype=torch.int64), mask, double(inputs["reference_log_probs"])[rows])
    check_case(case, preference_loss(Outputs(-current), batch, PreferenceConfig(**case["settings"])), current)


@pytest.mark.parametrize("case", TRL["reward"]["cases"], ids=lambda case: str("margin" in case))
def test_reward_loss_equals_trl(case: dict[str, Any]) -> None:
    rewards, last = double(TRL["reward"]["inputs"]["rewards"]).requires_grad_(), torch.tensor([3, 1, 2, 2, 0, 3])[:, None]
    mask = torch.arange(4) <= last
    margin = double(case["margin"]).repeat_interleave(2) if "margin" in case else None
    values = double([[9.0] * 4] * 6).scatter(1, last, rewards[:, None])
    check_case(case, reward_loss(Outputs(values), PreferenceBatch(mask.long(), mask, margin=margin)), rewards)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_gradient_at_ratio_1_is_that_of_reinforce(ratio: Any) -> None:
    """With a constant length of 1 it is RLOO's: the log-probability of a sequence times its advantage."""
    batch, current = rollouts()
    batch, mask = batch._replace(old_log_probs=current.detach()), batch.loss_mask[:, 1:]
    total, count = policy_loss(Outputs(-current), batch, PolicyConfig(normalization="constant", length=1, ratio=ratio))["loss"]
    (gradient,) = torch.autograd.grad(total / count, current)
    torch.testing.assert_close(gradient, -(batch.advantages * mask) / 4, rtol=0, atol=1e-12)


def test_values_outside_of_the_mask_have_no_effect() -> None:
    batch, current = rollouts()
    mask, cfg = batch.loss_mask[:, 1:], PolicyConfig(beta=0.1, importance_cap=2.0)
    noisy = batch._replace(**{name: getattr(batch, name).where(mask, torch.nan) for name in batch._fields[2:] if getattr(batch, name) is not None})
    results = [policy_loss(Outputs(-current), each, cfg) for each in (batch, noisy)]
    assert all(torch.equal(results[0][name][0], results[1][name][0]) for name in results[0])
    assert torch.autograd.grad(results[1]["loss"][0], current)[0].isfinite().all()


def test_value_loss_takes_the_larger_error() -> None:
    mask, old = shifted([[1, 1, 0]]), double([[1.0, 1.0, 1.0]])
    batch = RolloutBatch(mask.long(), mask, old, old, returns=double([[2.0, 0.0, 9.0]]), old_values=old)
    values = value_loss(Outputs(double([[1.5, 1.1, 5.0]])), batch)
    assert float(values["loss"][0]) == pytest.approx((0.8**2 + 1.1**2) / 2) and values["loss"][1] == 2
    assert values["clipped"] == (1, 2)
    with pytest.raises(ConfigError, match="needs returns"):
        value_loss(Outputs(old), batch._replace(returns=None))


def test_advantages_of_groups() -> None:
    rewards = double([[1.0, 0.0, 0.0, 1.0], [0.1, 0.1, 0.1, 0.1], [3.0, 1.0, 1.0, 1.0]])
    by_group, uniform = group_advantages(rewards, eps=0.0)
    assert uniform == 1 and by_group[1].eq(0).all()
    half = 3**0.5 / 2
    torch.testing.assert_close(by_group[[0, 2]], double([[half, -half, -half, half], [1.5, -0.5, -0.5, -0.5]]))
    torch.testing.assert_close(group_advantages(rewards, "none")[0][2], double([1.5, -0.5, -0.5, -0.5]))
    torch.testing.assert_close(group_advantages(rewards.numpy(), "batch", 0.0)[0][0] * rewards.std(), double([0.5, -0.5, -0.5, 0.5]))
    torch.testing.assert_close(leave_one_out(rewards)[0][[0, 2]], double([[2, -2, -2, 2], [6, -2, -2, -2]]) / 3)
    halves = [llm.moments(rewards[:1], rewards[:1] > -1), llm.moments(rewards[1:], rewards[1:] > -1)]
    white = llm.whiten(rewards, rewards > -1, halves[0] + halves[1])
    torch.testing.assert_close(white, (rewards - rewards.mean()) / rewards.std())


def test_generalized_advantage_estimates() -> None:
    """With gamma 0.5 and lambda 0.5, and a token of a tool in between."""
    mask = torch.tensor([[True, True, False, True, False]])
    rewards = kl_rewards([4.0], mask * 0.1, mask * 0.0, mask, beta=1.0)
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, -0.1, 0, 3.9, 0]]))
    advantages, returns = gae(double([[0, 0, 9, 4, 9]]), double([[1, 2, 7, 2, 7]]), mask, gamma=0.5, lam=0.5)
    torch.testing.assert_close(advantages, double([[-0.125, -0.5, 0, 2, 0]]))
    torch.testing.assert_close(returns, double([[0.875, 1.5, 0, 4, 0]]))


def test_the_coefficient_of_the_divergence_adapts() -> None:
    controller = KLController(KLConfig(beta=0.1, target=6.0, horizon=100))
    for kl in (6.0, 60.0, 5.4):
        controller.update(kl, 10)
    other = KLController(KLConfig())
    other.update(60.0, 10)
    assert (controller.beta, other.beta) == pytest.approx((0.1 * 1.02 * 0.99, 0.1))
    other.load_state_dict(controller.state_dict())
    assert other.beta == controller.beta


def test_errors_name_the_value() -> None:
    batch, current = rollouts(reference_log_probs=None, engine_log_probs=None)
    cases: list[tuple[Any, str]] = [
        (lambda: group_advantages([[1.0, 2.0], [0.0, float("nan")]]), "prompt 1, sample 1: the reward is nan"),
        (lambda: leave_one_out([[1.0]]), "one answer"), (lambda: kl_rewards([1], [[0]], [[0]], [[False]], 0.1), "sequence 0 has no"),
        (lambda: policy_loss(Outputs(-current), batch, PolicyConfig(beta=0.1)), "beta needs reference_log_probs"),
        (lambda: policy_loss(Outputs(-current), batch, PolicyConfig(importance_cap=2.0)), "importance_cap needs engine_log_probs"),
        (lambda: preference_loss(Outputs(-current), PreferenceBatch(*batch[:2])), "preferences need"),
        (lambda: reward_loss(Outputs(current), PreferenceBatch(batch[0][:3, 1:], batch[1][:3, 1:])), "has 3 rows"),
        (lambda: PolicyConfig(normalization="constant"), "give a length with constant"),
        (lambda: token_log_probs(LLM(LLMConfig(**SMALL, z_loss=0.1)), batch), "model.z_loss is 0.1"),
        (lambda: token_log_probs(LLM(LLMConfig(**SMALL, logit_softcap=9.0)), batch, 0.5), "soft cap 9 and temperature 0.5"),
    ]  # fmt: skip
    for function, text in cases:
        with pytest.raises((ConfigError, DataError, ValueError), match=text):
            function()


def test_log_probabilities_are_those_at_the_temperature() -> None:
    torch.manual_seed(0)
    model, tokens = LLM(LLMConfig(**SMALL, deviation=0.5)).double(), torch.randint(11, (2, 9))
    batch = RolloutBatch(tokens, torch.arange(9).expand(2, -1) > 3, torch.zeros(2, 8), torch.ones(2, 8))
    expected = (model(tokens[:, :-1]) / 0.7).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    torch.testing.assert_close(token_log_probs(model, batch, 0.7), expected * batch.loss_mask[:, 1:], rtol=0, atol=1e-12)


def test_a_critic_starts_from_a_language_model_and_is_saved(tmp_path: Path) -> None:
    folder, tokens = DATA / "llm" / "llama31_tiny" / "hf", torch.arange(12).view(2, 6)
    critic, model = Critic.load(folder), LLM.load(folder)
    assert critic(tokens).eq(0).all() and not critic.training
    assert all(torch.equal(x, y) for x, y in zip(critic.model.parameters(), model.model.parameters(), strict=True))
    torch.nn.init.normal_(critic.lm_head.weight)
    critic.save(tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        assert torch.equal(Critic.load(path)(tokens), critic(tokens)), "also the folder of a run"
    with pytest.raises(llm.CheckpointError if hasattr(llm, "CheckpointError") else Exception, match="lm_head.weight is"):
        LLM.load(tmp_path)
