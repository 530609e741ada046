"""Settings of a run that aligns a language model. It imports no torch."""

from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from hpcai.config import NonNegativeInt, PositiveInt, Settings
from hpcai.models.llm import AxesConfig, LLMConfig, LoRAConfig, PolicyConfig, PreferenceConfig, RewardConfig, RolloutConfig
from hpcai.settings import ReportConfig, RunConfig, StepConfig, TrainConfig

ROLLOUT_METHODS = "grpo", "rloo", "ppo"


class DataConfig(Settings):
    """Files of JSON lines. A prompt is a text, or messages {"role": ..., "content": ...} of a chat."""

    directory: Path = Path("datasets/arithmetic")
    """folder of the files"""
    prompts: str = "train.jsonl"
    """grpo, rloo, ppo: objects with prompt, and further values for the reward"""
    validation: str | None = "validation.jsonl"
    """held-out prompts, whose answers are rewarded at each evaluation; null: none"""
    validation_prompts: PositiveInt = 256
    """number of held-out prompts, from the first, at most"""
    pairs: str = "pairs.jsonl"
    """dpo, ipo, reward: objects with prompt, chosen and rejected"""
    validation_pairs: str | None = None
    """reward: held-out pairs, whose accuracy is evaluated; null: none"""
    batch: PositiveInt = 64
    """dpo, ipo, reward: pairs of an optimizer step, over all replicas"""
    stage: None = None
    """these files are small: they are not copied"""


class StartConfig(Settings):
    """Weights in Hugging Face's format, folders of runs, or safetensors files of hpcai."""

    weights: Path = Path("runs/arithmetic-sft")
    """of the policy, and of a reward model before its training"""
    tokenizer: Path | None = None
    """tokenizer.json or its folder; null: the one beside the weights"""
    reference: Path | None = None
    """frozen weights of the reference; null: `weights`"""
    critic: Path | None = None
    """ppo: of the critic, such as a reward model; null: `weights`, with a new output layer"""


class Config(RunConfig):
    """A run that aligns a language model. An epoch is one pass over the prompts or pairs."""

    method: Literal["grpo", "rloo", "ppo", "dpo", "ipo", "reward"] = "grpo"
    """reinforcement learning by GRPO, RLOO or PPO; DPO or IPO with pairs of answers; reward: train a reward model with these"""
    model: LLMConfig = LLMConfig()
    """settings of training, such as `recompute`; the others are those of start.weights"""
    lora: LoRAConfig | None = None
    """adapters; only they are trained"""
    data: DataConfig = DataConfig()  # type: ignore[assignment]
    mesh: AxesConfig = AxesConfig()
    start: StartConfig = StartConfig()
    rollout: RolloutConfig = RolloutConfig()
    """grpo, rloo, ppo: sampled answers; `rollout.validation`, `sizes` and `engine` are also those of evaluations"""
    policy: PolicyConfig = PolicyConfig()
    """grpo, rloo, ppo: the objective; its temperature is that of rollout.sampling"""
    preference: PreferenceConfig = PreferenceConfig()
    """dpo, ipo: the loss, which is that of `method`"""
    reward: RewardConfig = RewardConfig()
    step: StepConfig = StepConfig(lr=1e-6, betas=(0.9, 0.999), weight_decay=0.0, clip=1.0)
    train: TrainConfig = TrainConfig(epochs=1, better="higher")
    report: ReportConfig = ReportConfig(directory=Path("runs/align"))
    pictures: NonNegativeInt = 8
    """held-out prompts whose answers are in the report"""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.mesh.evaluate or self.train.evaluate == "background":
            raise ValueError("answers are evaluated by the training ranks; set mesh.evaluate to 0 and train.evaluate to wait")
        if self.method == "ppo" and (self.mesh.pipeline > 1 or self.lora is not None):
            raise ValueError("ppo trains all weights of policy and critic on each replica; set mesh.pipeline to 1, lora to null")
        if self.method == "ppo" and self.policy.normalization != "token":
            raise ValueError(f"policy.normalization is {self.policy.normalization}, but ppo has means over tokens; set it to token")
        return self

    @property
    def is_evaluated(self) -> bool:
        """Whether answers to held-out prompts are rewarded."""
        reward = self.reward
        return self.data.validation is not None and self.method != "reward" and bool(reward.function or reward.program)
