"""A decoder with one value of each token: the critic of PPO, or a reward model.   B rows, T tokens, C channels"""

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai.models.llm.config import LLMConfig
from hpcai.models.llm.model import LLM
from hpcai.nn.deferred_init import deferred, materialize
from hpcai.nn.seam import Seam
from hpcai.nn.weights import PretrainedMixin


class ValueHead(nn.Linear):
    """hidden [B, T, C] -> values [B, T], in float32 or wider. Its weights are 0 at first."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, 1, bias=False)
        self.all_values: nn.Module = Seam()  # gathers those of tokens that are sharded between layers

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, hidden: Tensor, targets: None = None) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            return cast(Tensor, self.all_values(F.linear(hidden.to(wide), self.weight.to(wide))[..., 0]))


class Critic(LLM):
    """A decoder with one value of each token, [B, T] -> [B, T]: the value of the state after it (PPO, Schulman et al. 2017), or of
    the last token of a text its reward. It is called, sharded and trained as an ``LLM``, without targets.

    ``load`` reads a file that ``save`` wrote, the decoder of a language model, or a folder of Hugging Face for the classification
    of sequences with one label.
    """

    def __init__(self, cfg: LLMConfig) -> None:
        super().__init__(cfg.model_copy(update={"tied": False, "mtp_layers": 0}))
        self.lm_head: Any = ValueHead(cfg.width)

    @classmethod
    def load(cls, path: str | Path, cfg: LLMConfig | None = None) -> Self:
        module = import_module(f"{cls.package}.load")
        with deferred():
            critic = cls(cfg or module.read_settings(path))
        return materialize(module.load_deferred(critic, path), "cpu").eval()  # type: ignore[return-value]

    def output_files(self, export: Any) -> dict[str, Any]:
        return PretrainedMixin.output_files(self, export)


class Part:
    """The policy or the critic of an ``ActorCritic``. All attributes are its own."""

    def __init__(self, actor_critic: nn.Module, name: str) -> None:
        self.actor_critic, self.name = actor_critic, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.actor_critic(self.name, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self.actor_critic, self.name), name)


class ActorCritic(PretrainedMixin):
    """A policy and its critic, which are trained in one step (PPO), with ``kl_beta``, the coefficient of the divergence from the
    reference in rewards: checkpoints have it. The files of a run are those of the policy."""

    def __init__(self, policy: LLM, critic: Critic, kl_beta: float) -> None:
        super().__init__()
        self.policy, self.critic, self.cfg, self.package = policy, critic, policy.cfg, policy.package
        self.kl_beta: torch.Tensor
        self.register_buffer("kl_beta", torch.full((), kl_beta, dtype=torch.float64))

    def forward(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, name)(*args, **kwargs)

    def part(self, name: str) -> "Part":
        """Return the policy or the critic, to be called through this module: hooks of a sharded one gather weights of both."""
        return Part(self, name)

    def output_files(self, export: Any) -> dict[str, Any]:
        def names(name: str) -> str | None:
            return name.removeprefix("policy.") if name.startswith("policy.") else None

        return self.policy.output_files(partial(export, names=names))
