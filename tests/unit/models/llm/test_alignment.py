"""Losses of alignment equal trl's, advantages small examples, and a critic is saved and loaded."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from hpcai.errors import CheckpointError, ConfigError, DataError
from hpcai.models import llm
from hpcai.models.llm import LLM, Critic, KLConfig, KLController, LLMConfig, PolicyConfig, PreferenceBatch, RolloutBatch
from tests.reference_data import DATA, load_json

TRL = load_json("llm/alignment")
POLICY, PREFERENCE = TRL["policy"]["inputs"], TRL["preference"]["inputs"]
SMALL: dict[str, Any] = {"vocabulary": 11, "width": 16, "layers": 1, "heads": 2, "inner": 24, "positions": 16}
Case = dict[str, Any]


class Outputs:
    """A model that returns ``output`` [B, T] as the cross entropy of targets, or as values."""

    def __init__(self, output: Tensor, training: bool = True, **cfg: Any) -> None:
        self.output, self.training, self.cfg = output, training, SimpleNamespace(**{"z_loss": 0.0, "experts": None} | cfg)

    def __call__(self, tokens: Tensor, targets: Tensor | None, *args: Any) -> Tensor:
        return self.output if targets is None else self.output.where(targets >= 0, 0)


def double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def rollouts() -> tuple[RolloutBatch, Tensor]:
    """Return the batch of the reference, and the new log-probabilities."""
    mask, advantages = pad(torch.tensor(POLICY["mask"]).bool(), (1, 0)), double(POLICY["advantages"])[:, None].expand(-1, 6)
    old, reference, engine = (double(POLICY[f"{name}_log_probs"]) for name in ("old", "reference", "engine"))
    return RolloutBatch(mask.long(), mask, old, advantages, None, reference, engine), double(POLICY["log_probs"]).requires_grad_()


def check_case(case: Case, values: Case, inputs: Tensor, skipped: tuple[str, ...] = ()) -> None:
    """Compare means, and the gradient of the loss. Shares are float32 in the reference."""
    (gradient,) = torch.autograd.grad(values["loss"][0] / values["loss"][1], inputs)
    torch.testing.assert_close(gradient, double(case["gradient"]), rtol=0, atol=1e-10)
    for name in case.keys() - {"settings", "gradient", "rows", "margin", *skipped}:
        tolerance = 1e-6 if name == "accuracy" or "clipped" in name else 1e-10
        assert float(values[name][0].detach() / values[name][1]) == pytest.approx(case[name], rel=0, abs=tolerance), name


@pytest.mark.parametrize("case", TRL["policy"]["cases"], ids=lambda case: str(case["settings"]))
@pytest.mark.parametrize("packed", [False, True])
def test_policy_loss_equals_trl(case: Case, packed: bool) -> None:
    """Also with two sequences in each row."""
    batch, current = rollouts()
    output = current
    if packed:
        *joined, output = (x if x is None else x.unflatten(0, (2, 2)).flatten(1) for x in (*batch, current))
        columns = torch.tensor([*range(6), *range(7, 13)])
        *fields, output = (x if x is None else x.new_zeros(2, 13).index_copy(1, columns, x) for x in (*joined[2:], output))
        batch = RolloutBatch(*joined[:2], *fields)._replace(documents=(torch.arange(14) // 7).expand(2, -1))
    values = llm.policy_loss(Outputs(-output), batch, PolicyConfig(**case["settings"]))
    per_sequence = ("clipped_low", "clipped_high") if "ratio" in case["settings"] else ()
    check_case(case, values, current, per_sequence)


@pytest.mark.parametrize("case", TRL["preference"]["cases"], ids=lambda case: str(case["settings"]))
def test_preference_loss_equals_trl(case: Case) -> None:
    rows = case.get("rows", slice(None))
    mask, current = torch.tensor(PREFERENCE["loss_mask"])[rows].bool(), double(PREFERENCE["log_probs"])[rows].requires_grad_()
    batch = PreferenceBatch(mask.long(), mask, double(PREFERENCE["reference_log_probs"])[rows])
    check_case(case, llm.preference_loss(Outputs(-current), batch, llm.PreferenceConfig(**case["settings"])), current)


@pytest.mark.parametrize("case", TRL["reward"]["cases"], ids=["plain", "margin"])
def test_reward_loss_equals_trl(case: Case) -> None:
    rewards, last = double(TRL["reward"]["inputs"]["rewards"]).requires_grad_(), torch.tensor([3, 1, 2, 2, 0, 3])[:, None]
    mask, margin = torch.arange(4) <= last, double(case["margin"]).repeat_interleave(2) if "margin" in case else None
    values = torch.full((6, 4), 9.0).double().scatter(1, last, rewards[:, None])
    check_case(case, llm.reward_loss(Outputs(values), PreferenceBatch(mask.long(), mask, margin=margin)), rewards)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_gradient_at_ratio_1_is_that_of_reinforce(ratio: Any) -> None:
    """With a constant length of 1 it is RLOO's: of the log-probability of a sequence times its advantage."""
    batch, current = rollouts()
    batch, cfg = batch._replace(old_log_probs=current.detach()), PolicyConfig(normalization="constant", length=1, ratio=ratio)
    total, count = llm.policy_loss(Outputs(-current), batch, cfg)["loss"]
    (gradient,) = torch.autograd.grad(total / count, current)
    torch.testing.assert_close(gradient, -(batch.advantages * batch.loss_mask[:, 1:]) / 4, rtol=0, atol=1e-12)


def test_fields_outside_of_the_mask_have_no_effect() -> None:
    batch, current = rollouts()
    cfg = PolicyConfig(ratio="sequence", beta=0.1, importance_cap=2.0)
    noisy = RolloutBatch(*batch[:2], *(None if x is None else x.where(batch.loss_mask[:, 1:], torch.nan) for x in batch[2:]))
    values, other = (llm.policy_loss(Outputs(-current), x, cfg) for x in (batch, noisy))
    assert all(torch.equal(values[name][0], other[name][0]) for name in values)
    assert torch.autograd.grad(other["loss"][0], current)[0].isfinite().all()


def test_value_loss_takes_the_larger_error() -> None:
    mask, old = torch.tensor([[False, True, True, False]]), double([[1.0, 1.0, torch.nan]])
    batch = RolloutBatch(mask.long(), mask, old, old, returns=double([[2.0, 0.0, torch.nan]]), old_values=old)
    current = double([[1.5, 1.1, 5.0]]).requires_grad_()
    values = llm.value_loss(Outputs(current), batch)
    torch.testing.assert_close(values["loss"], (double((0.8**2 + 1.1**2) / 2), double(2.0)))
    torch.testing.assert_close(torch.autograd.grad(values["loss"][0], current)[0], double([[0.0, 1.1, 0.0]]))
    assert values["clipped"] == (1, 2)


def test_advantages_of_groups() -> None:
    rewards, half = double([[1.0, 0.0, 0.0, 1.0], [0.1, 0.1, 0.1, 0.1], [3.0, 1.0, 1.0, 1.0]]), 3**0.5 / 2
    centered = double([[0.5, -0.5, -0.5, 0.5], [0, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]])
    values, uniform = llm.group_advantages(rewards, eps=0.0)
    assert uniform == 1 and values[1].eq(0).all()
    torch.testing.assert_close(values[[0, 2]], double([[half, -half, -half, half], [1.5, -0.5, -0.5, -0.5]]))
    torch.testing.assert_close(llm.group_advantages(rewards, "none")[0], centered)
    torch.testing.assert_close(llm.group_advantages(rewards.numpy(), "batch", 0.0)[0] * rewards.std(), centered)
    torch.testing.assert_close(llm.leave_one_out(rewards)[0], centered * 4 / 3)
    total = llm.moments(rewards[:1], rewards[:1] < 9) + llm.moments(rewards[1:], rewards[1:] < 9)
    torch.testing.assert_close(llm.whiten(rewards, rewards < 9, total), (rewards - rewards.mean()) / rewards.std())


def test_generalized_advantage_estimates_pass_over_other_tokens() -> None:
    mask = torch.tensor([[True, True, False, True, False]])
    rewards = llm.kl_rewards([4.0], mask * 0.1, mask * 0.0, mask, beta=1.0)
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, -0.1, 0, 3.9, 0]]))
    advantages, returns = llm.gae(double([[0, 0, 9, 4, 9]]), double([[1, 2, 7, 2, 7]]), mask, gamma=0.5, lam=0.5)
    torch.testing.assert_close(advantages, double([[-0.125, -0.5, 0, 2, 0]]))
    torch.testing.assert_close(returns, double([[0.875, 1.5, 0, 4, 0]]))


def test_the_coefficient_of_the_divergence_adapts() -> None:
    controller, fixed = KLController(KLConfig(beta=0.1, target=6.0, horizon=100)), KLController(KLConfig())
    for kl in (6.0, 60.0, 5.4):
        controller.update(kl, 10)
        fixed.update(kl, 10)
    assert (controller.beta, fixed.beta) == pytest.approx((0.1 * 1.02 * 0.99, 0.1))
    fixed.load_state_dict(controller.state_dict())
    assert fixed.beta == controller.beta


def test_errors_name_the_value() -> None:
    full, current = rollouts()
    batch, outputs = full._replace(reference_log_probs=None, engine_log_probs=None), Outputs(-current)
    balanced = Outputs(-current, experts=SimpleNamespace(balance_loss=0.1, z_loss=0.0))
    cases: list[tuple[Any, str]] = [
        (lambda: llm.group_advantages([[1.0, 2.0], [0.0, float("nan")]]), "prompt 1, sample 1: the reward is nan"),
        (lambda: llm.leave_one_out([[1.0]]), "one answer"),
        (lambda: llm.kl_rewards([1], [[0]], [[0]], [[False]], 0.1), "sequence 0 has no token"),
        (lambda: llm.policy_loss(outputs, batch, PolicyConfig(beta=0.1)), "beta needs reference_log_probs"),
        (lambda: llm.policy_loss(outputs, batch, PolicyConfig(importance_cap=2.0)), "importance_cap needs engine_log_probs"),
        (lambda: llm.policy_loss(balanced, batch, PolicyConfig(normalization="sequence")), "count once per token"),
        (lambda: llm.value_loss(outputs, batch), "needs returns"),
        (lambda: llm.preference_loss(outputs, PreferenceBatch(*batch[:2])), "preferences need"),
        (lambda: llm.reward_loss(Outputs(current[:3]), PreferenceBatch(batch[0][:3, 1:], batch[1][:3, 1:])), "has 3 rows"),
        (lambda: PolicyConfig(normalization="constant"), "give a length with constant"),
        (lambda: llm.PreferenceConfig(loss="ipo", label_smoothing=0.1), "ipo does not have"),
        (lambda: llm.token_log_probs(Outputs(-current, z_loss=0.1), batch), "model.z_loss is 0.1"),
        (lambda: llm.token_log_probs(LLM(LLMConfig(**SMALL, logit_softcap=9.0)), batch, 0.5), "temperature is 0.5"),
    ]
    for function, text in cases:
        with pytest.raises((ConfigError, DataError, ValueError), match=text):
            function()


def test_log_probabilities_are_those_at_the_temperature() -> None:
    torch.manual_seed(0)
    model, tokens = LLM(LLMConfig(**SMALL, deviation=0.5)).double(), torch.randint(11, (2, 9))
    batch = RolloutBatch(tokens, torch.arange(9).expand(2, -1) > 3, torch.zeros(2, 8), torch.ones(2, 8))
    expected = (model(tokens[:, :-1]) / 0.7).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    torch.testing.assert_close(llm.token_log_probs(model, batch, 0.7), expected * batch.loss_mask[:, 1:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["llama31_tiny", "llama2_tiny"])
def test_a_critic_starts_from_a_language_model_and_is_saved(name: str, tmp_path: Path) -> None:
    """The first has tied embeddings."""
    folder, tokens = DATA / "llm" / name / "hf", torch.arange(12).view(2, 6)
    critic, model = Critic.load(folder), LLM.load(folder)
    assert critic(tokens).eq(0).all() and not critic.training
    assert all(torch.equal(x, y) for x, y in zip(critic.model.parameters(), model.model.parameters(), strict=True))
    torch.nn.init.normal_(critic.lm_head.weight)
    critic.save(tmp_path / "model.safetensors")
    assert torch.equal(Critic.load(tmp_path)(tokens), critic(tokens))
    with pytest.raises(CheckpointError, match="lm_head.weight is"):
        LLM.load(tmp_path)
