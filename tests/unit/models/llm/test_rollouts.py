"""Rollouts resume exactly wherever a run ends, answers do not depend on what shares a step, and bad rewards are named."""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcai.dist.mesh import Mesh
from hpcai.errors import ConfigError, DataError
from hpcai.models import llm
from hpcai.models.llm.engine import Engine
from hpcai.nn.deferred_init import deferred, materialize
from hpcai.settings import CheckpointConfig, ReportConfig, RunConfig, StepConfig, TrainConfig
from hpcai.train import Run, Step, fit

SMALL: dict[str, Any] = {"vocabulary": 257, "width": 16, "layers": 1, "heads": 2, "inner": 24, "positions": 32}
BYTES = llm.Tokenizer.byte_level()
PROMPTS = [llm.Prompt(f"{n}+{n}", BYTES.encode(f"{n}+{n}"), {"answer": 2 * n}, f"line {n}") for n in range(8)]
SAMPLING = llm.SamplingConfig(temperature=1.0, most=6)
SIZES = llm.RolloutConfig(prompts=2, num_generations=2, sampling=SAMPLING, validation=llm.SamplingConfig(most=6))


def count_low(prompts: list[str], completions: list[str], answer: list[int]) -> list[float]:
    """Reward characters with low codes, and check that columns are those of the prompts."""
    assert [f"{n // 2}+{n // 2}" for n in answer] == prompts
    return [sum(ord(letter) < 100 for letter in text) / 6 for text in completions]


def network(kind: type[llm.LLM] = llm.LLM, seed: int = 0, **settings: Any) -> Any:
    with deferred(seed):
        return llm.parallelize(kind(llm.LLMConfig(**SMALL | settings)), Mesh({}))


def frozen(**kwargs: Any) -> llm.Network:
    return llm.Network(materialize(network(**kwargs), "cpu", dtype=torch.float64).requires_grad_(False))


def new_step(method: str) -> Step:
    model = llm.ActorCritic(network(), network(llm.Critic, 1), 0.1) if method == "ppo" else network()
    loss: Any = llm.actor_critic_loss if method == "ppo" else partial(llm.policy_loss, cfg=llm.PolicyConfig(beta=0.01))
    return Step(model, loss, StepConfig(precision="fp64", lr=0.01, clip=1.0), Mesh({}))


def new_rollouts(
    step: Step, method: str = "grpo", reward: Any = count_low, cfg: llm.RolloutConfig = SIZES, **kwargs: Any
) -> llm.Rollouts:  # fmt: skip
    generator = None
    if cfg.staleness:
        copy = llm.ActorCritic(network(), network(llm.Critic), 0.1) if method == "ppo" else network()
        generator = llm.Network(step.mesh.background_copy(materialize(copy, "cpu", dtype=torch.float64)).requires_grad_(False))
    reward = llm.Rewards(llm.RewardConfig(), reward) if callable(reward) and not isinstance(reward, llm.Rewards) else reward
    kwargs = {"generator": generator, "reference": frozen(), "stop": [256]} | kwargs
    return llm.Rollouts(step, PROMPTS, reward, cfg, BYTES, method=method, **kwargs)


class Killed(Exception):  # noqa: N818
    pass


def train_run(folder: Path, method: str, cfg: llm.RolloutConfig, steps: int, kill: Callable[[str], None]) -> dict[str, Any]:
    """Train in ``folder`` as one job does, and return the final weights. ``kill(place)`` may end it in a rollout or an update."""

    def reward(**kwargs: Any) -> list[float]:
        kill("rollout")
        return count_low(**kwargs)

    step = new_step(method)
    loss = step.loss

    def counted(*args: Any) -> Any:
        kill("update")
        return loss(*args)

    step.loss = counted
    settings = RunConfig(report=ReportConfig(directory=folder, sinks=()), checkpoint=CheckpointConfig(every_steps=1, keep=3))
    with Run("test", settings, step.mesh) as run:
        fit(step, new_rollouts(step, method, reward, cfg, directory=folder), TrainConfig(steps=steps, report_every=1), run=run)
    return step.model.state_dict()


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(("method", "passes"), [("grpo", 2), ("ppo", 1)])
def test_a_run_killed_in_rollouts_and_updates_resumes_exactly(method: str, passes: int, staleness: int, tmp_path: Path) -> None:
    cfg = SIZES.model_copy(update={"staleness": staleness, "num_mini_batches": 2, "num_ppo_epochs": passes})
    steps, places = 4 * passes + 1, {"rollout": 0, "update": 0}

    def count(place: str) -> None:
        places[place] += 1

    expected, killed = train_run(tmp_path / "whole", method, cfg, steps, count), set[str]()
    assert places["update"] == steps and places["rollout"] >= 3
    calls = dict.fromkeys(places, 0)

    def kill_often(place: str) -> None:
        calls[place] += 1
        if calls[place] % {"rollout": 3, "update": 4}[place] == 0:
            raise Killed(place)

    for _ in range(2 * steps):
        try:
            actual = train_run(tmp_path / "killed", method, cfg, steps, kill_often)
            break
        except (Killed, DataError) as error:
            killed.add(next(place for place in places if place in str(error)))
    assert killed == {*places}
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name
    assert len(list((tmp_path / "killed/rollouts").iterdir())) <= 4 + staleness, "files that no checkpoint needs are deleted"


def test_answers_are_those_of_the_seed_for_any_engine_size_and_stale_ones_are_of_earlier_weights() -> None:
    step = new_step("grpo")
    small = SIZES.model_copy(update={"sizes": llm.EngineConfig(max_num_seqs=1, block_size=4)})
    batches = [next(iter(new_rollouts(new_step("grpo"), cfg=cfg).epoch(0))) for cfg in (SIZES, small)]
    assert torch.equal(batches[0].tokens, batches[1].tokens)
    torch.testing.assert_close(batches[0].engine_log_probs, batches[0].old_log_probs.where(batches[0].loss_mask[:, 1:], 0))
    stale = new_rollouts(step, cfg=SIZES.model_copy(update={"staleness": 1}))
    second = [batch.tokens for batch, _ in zip(stale.epoch(0), range(2)) if step(batch, 0.5)][1]
    fresh = new_rollouts(new_step("grpo"))
    assert torch.equal(second, [batch.tokens for batch, _ in zip(fresh.epoch(0), range(2))][1]), "of the first weights"


def test_an_iteration_is_reported_with_what_its_answers_are() -> None:
    events, step = list[dict[str, Any]](), new_step("grpo")
    emit = lambda kind, **fields: events.append(fields)  # noqa: E731
    rollouts = new_rollouts(step, reward=lambda prompts, **_: [1.0] * len(prompts), emit=emit)
    fit(step, rollouts, TrainConfig(steps=2))
    assert [event["step"] for event in events] == [0, 1] and all(event["uniform_groups"] == 2 for event in events)
    assert events[0]["solved"] == events[0]["reward"] == 1 and events[0]["answers"] == 4 and events[1]["train_seconds"] > 0
    assert {*events[0]["samples"][0]} == {"prompt", "answer", "reward"} and "4 of 4 prompts had" not in rollouts.news()
    values = rollouts.score(step.model, rollouts.validation(PROMPTS[:3])[0])
    assert float(values["solved"][0]) == 3 == float(values["reward"][1]) and len(rollouts.last_answers) == 3


@pytest.mark.parametrize(
    ("cfg", "kwargs", "expected"),
    [
        ({"prompts": 3, "num_mini_batches": 2}, {}, "rollout.prompts is 3, no multiple of 2: rollout.num_mini_batches"),
        ({"prompts": 9}, {}, "there are 8 prompts, rollout.prompts is 9"),
        ({"num_generations": 1}, {}, "rollout.num_generations is 1, and grpo compares"),
        ({}, {"reference": frozen(vocabulary=300)}, "the reference has 300 vocabulary entries, the policy 257"),
        ({}, {"reward": frozen(kind=llm.Critic, vocabulary=300)}, "the reward model has 300 vocabulary entries"),
        ({}, {"method": "ppo"}, "ppo needs a step with an ActorCritic"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(cfg: dict[str, Any], kwargs: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        new_rollouts(new_step("grpo"), cfg=SIZES.model_copy(update=cfg), **kwargs)


def test_a_prompt_that_is_too_long_is_named() -> None:
    long = [*PROMPTS[:2], llm.Prompt("", [1] * 32, {}, "prompts.jsonl: line 3")]
    with pytest.raises(DataError, match="prompts.jsonl: line 3 has 32 tokens, the model 32 positions"):
        llm.Rollouts(new_step("grpo"), long, llm.Rewards(llm.RewardConfig(), count_low), SIZES, BYTES)


def test_an_engine_out_of_memory_goes_on_with_fewer_texts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step, compute = Engine.step, new_step("grpo")
    expected = next(iter(new_rollouts(new_step("grpo")).epoch(0)))

    def limited(engine: Engine) -> Any:
        if engine.cfg.max_num_seqs > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(engine)

    monkeypatch.setattr(Engine, "step", limited)
    rollouts = new_rollouts(compute, cfg=SIZES.model_copy(update={"sizes": llm.EngineConfig(max_num_seqs=8)}))
    assert torch.equal(next(iter(rollouts.epoch(0))).tokens, expected.tokens)
    assert "out of memory: 2 texts at a time" in caplog.text


def test_a_reward_model_rewards_its_last_token() -> None:
    rollouts = new_rollouts(new_step("grpo"), reward=frozen(kind=llm.Critic, seed=3))
    torch.nn.init.normal_(rollouts.reward.model.lm_head.weight)
    rows = rollouts._sample(0)
    for row in range(4):
        length = int(rows["loss_mask"][row].nonzero().max()) + 1
        values = rollouts.reward.model(rows["tokens"][row : row + 1, :length])
        torch.testing.assert_close(rows["rewards"][row], values[0, -1])


# ---- rewards


PROGRAM = """import json, sys, time
row = json.load(sys.stdin)
if row["completion"] == "slow": time.sleep(60)
print({"nan": "nan", "text": "many", "bad": 1 / (row["completion"] != "bad")}.get(row["completion"], row["answer"]))
"""


@pytest.mark.parametrize(
    ("completion", "expected"),
    [("nan", "the reward is nan"), ("bad", "ZeroDivisionError"), ("text", "many"), ("slow", "within [0-9.]+ s .reward.timeout.")],
)
@pytest.mark.parametrize("kind", ["function", "program"])
def test_a_reward_that_fails_is_named_or_0(kind: str, completion: str, expected: str, tmp_path: Path) -> None:
    def reward(prompts: list[str], completions: list[str], answer: list[float]) -> list[Any]:
        values: dict[str, Any] = {"nan": float("nan"), "text": "many"}
        time.sleep(2.0 * ("slow" in completions))
        return [values.get(text, number / (text != "bad")) for text, number in zip(completions, answer)]

    (tmp_path / "reward.py").write_text(PROGRAM)
    program = (sys.executable, "-S", str(tmp_path / "reward.py")) if kind == "program" else ()
    cfg = llm.RewardConfig(timeout=2 if program else 0.2, program=program)
    arguments: Any = ["p", "q", "r"], ["fine", completion, "fine"], {"answer": [2.0, 3.0, 4.0]}
    with pytest.raises(DataError, match=f"answer '{completion}' to prompt 'q': .*{expected}"):
        llm.Rewards(cfg, reward)(*arguments)
    rewards = llm.Rewards(cfg.model_copy(update={"on_failure": "zero"}), reward)
    assert rewards(*arguments) == [2.0, 0.0, 4.0] and rewards.failures == 1 and "to prompt 'q'" in rewards.last_failure


def test_rewards_of_another_number_and_functions_that_are_not_there_are_named() -> None:
    with pytest.raises(DataError, match="returned 1 rewards of 2 answers"):
        llm.Rewards(llm.RewardConfig(), lambda prompts, completions: [1.0])(["a", "b"], ["", ""], {})
    for path, problem in ("nowhere:f", "No module named 'nowhere'"), ("json:nothing", "no attribute"), ("math:pi", "is a float"):
        with pytest.raises(ConfigError, match=problem):
            llm.Rewards(llm.RewardConfig(function=path))
    with pytest.raises(ConfigError, match="cannot be started"):
        llm.Rewards(llm.RewardConfig(program=("/nowhere",)))(["a"], ["b"], {})


# ---- preferences


def test_pairs_get_the_reference_and_an_order_of_each_epoch() -> None:
    model = network()
    step = Step(model, partial(llm.preference_loss, cfg=llm.PreferenceConfig()), StepConfig(precision="fp64", lr=0.01), Mesh({}))
    pairs = [llm.Pair([n, 1], [2] * (n + 1), [3], f"line {n}") for n in range(4)]
    data, reference = llm.Preferences(step, pairs, 2, reference=frozen()), frozen().model
    first, second = data.epoch(0)
    again = [*data.epoch(0, first=2)]
    assert len(again) == 1 and torch.equal(again[0].tokens, second.tokens) and len(data) == 2
    assert {*first.tokens[::2, 0].tolist(), *second.tokens[::2, 0].tolist()} == {0, 1, 2, 3}
    assert first.reference_log_probs is not None
    torch.testing.assert_close(first.reference_log_probs, llm.answer_log_probs(reference, first))
    accuracy = fit(step, data, TrainConfig(epochs=30, report_every=60)).reports[-1]["accuracy"]
    assert accuracy > 0.9
    for pair, problem in (llm.Pair([], [1], [2]), "a pair: a prompt or an answer"), (llm.Pair([1], [2] * 32, [1]), "33 tokens"):
        with pytest.raises(DataError, match=problem):
            llm.Preferences(step, [pair], 1)
    with pytest.raises(ConfigError, match="there are 4 pairs, data.batch is 5"):
        llm.Preferences(step, pairs, 5)
