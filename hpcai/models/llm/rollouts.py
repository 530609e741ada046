"""Rollouts: answers that a policy samples, and their rewards, as a data source of the training loop.

    rollouts = Rollouts(step, prompts, Rewards(cfg.reward), cfg.rollout, tokenizer)
    fit(step, rollouts, cfg.train, validation=rollouts.validation(held_out), evaluate=rollouts.score)

An iteration samples answers of some prompts, scores them, and gives them to the steps of the loop. All of it is a function of the
weights, the seed and the number of the iteration, for any number of replicas. Answers that are needed after a checkpoint lie in
files beside it, so that a run that was killed resumes exactly.   P prompts of a replica, N sampled answers, T tokens, L = T + 1
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hpcai.dist.background import submit
from hpcai.dist.collectives import all_reduce_, broadcast_from_first, broadcast_object, gather_to_first
from hpcai.dist.mesh import Axis
from hpcai.dist.watchdog import HEARTBEAT, waiting_at
from hpcai.errors import ConfigError, DataError
from hpcai.models.llm.advantages import KLController, gae, group_advantages, kl_rewards, leave_one_out, moments, whiten
from hpcai.models.llm.alignment import RolloutBatch, answer_rewards, token_log_probs, token_values
from hpcai.models.llm.alignment_config import RolloutConfig
from hpcai.models.llm.config import SamplingConfig
from hpcai.models.llm.critic import ActorCritic
from hpcai.models.llm.engine import Engine
from hpcai.models.llm.gathered import active_pipeline
from hpcai.models.llm.generation import check_prompts
from hpcai.models.llm.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
_ADVANTAGES = {"grpo", "rloo", "ppo"}
_STATS = ("answers", "reward", "solved", "tokens", "ended", "kl", "uniform_groups", "generate_seconds", "score_seconds")


@dataclass
class Prompt:
    """A prompt, its tokens, and further values that its reward needs. ``where``: Its file and line, for errors."""

    text: str
    tokens: list[int]
    columns: Mapping[str, Any]
    where: str = "a prompt"


class Network(NamedTuple):
    """A model on this mesh, with its pipeline if it has stages."""

    model: Any
    pipeline: Any = None


class Source:
    """A data source of alignment: the order of its items, and outputs of networks for its rows.

    ``rows``: The number of rows of an optimizer step, over all replicas. ``pad_to``: Lengths are rounded up to a multiple of it."""

    def __init__(self, step: Any, rows: int, pad_to: int, seed: int) -> None:
        self.step, self.rows, self.pad_to, self.seed = step, rows, pad_to, seed
        self.replicas: Axis = step.mesh["replicate"]

    def order(self, epoch: int, count: int) -> list[int]:
        """Return the order of ``count`` items in an epoch."""
        return np.random.default_rng([self.seed, epoch]).permutation(count).tolist()

    def check_vocabulary(self, **networks: Any) -> None:
        """Raise ConfigError for a ``Network`` with another vocabulary than the policy."""
        ours = policy_of(self.step.model).cfg.vocabulary
        for name, network in networks.items():
            if isinstance(network, Network) and (theirs := network.model.cfg.vocabulary) != ours:
                problem = f"the {name.replace('_', ' ')} has {theirs} vocabulary entries, the policy {ours}"
                raise ConfigError(f"{problem}; take one with its tokens")

    def compute(
        self, network: Network, function: Callable[[Any, Any], Tensor], fields: Mapping[str, Tensor], all_tokens: bool = False
    ) -> Tensor:
        """Return ``function(model, batch)`` of all rows, computed as many at a time as in training, on the CPU.   [N, ...]

        ``all_tokens``: The model reads all tokens, otherwise all but the last."""
        model, pipeline = network.model, active_pipeline(policy_of(network.model), network.pipeline)
        size = max(self.rows // self.replicas.size // self.step.cfg.accumulate, 1)
        results, training = list[Tensor](), model.training
        columns = fields["tokens"].shape[1]
        columns = self.round_length(columns) if all_tokens else self.round_length(columns - 1) + 1
        model.eval()
        try:
            for rows in range(0, len(fields["tokens"]), size):
                each = (fit_columns(fields[name][rows : rows + size], columns) for name in ("tokens", "loss_mask"))
                tokens, mask = (x.to(self.step.mesh.device) for x in each)
                batch = RolloutBatch(tokens, mask, tokens, tokens)
                if pipeline is None:
                    with self.step.autocast():
                        y = function(model, batch).cpu()
                else:
                    output: Any = pipeline.forward(function, batch, self.step.autocast)
                    output = None if output is None else output.cpu()
                    y = broadcast_object(output, pipeline.axis, pipeline.source)
                results.append(fit_columns(y, fields["tokens"].shape[1] - 1) if y.ndim == 2 else y)
                HEARTBEAT.beats += 1
        finally:
            model.train(training)
        return torch.cat(results)

    def round_length(self, tokens: int) -> int:
        """Return a length of batches, at least ``tokens``, up to that of the model."""
        most: int = policy_of(self.step.model).cfg.max_length
        return min(-(-tokens // self.pad_to) * self.pad_to, max(most, tokens))


class Rollouts(Source):
    """The data source of reinforcement learning, with the interface of a loader.

    ``reward``: ``Rewards``, or the ``Network`` of a reward model. ``generator``: The network that samples; its weights are copied
    from those of the step at each iteration. None: that of the step itself. ``staleness`` 1 needs one of its own, whose collectives
    have groups of their own (``mesh.background_copy``). ``reference``: Frozen. ``directory``: Of the run; None: nothing is saved.
    ``emit(kind, **fields)`` receives an event of each iteration; ``oldest()`` returns the first step that may be resumed.

    Raises ConfigError for sizes that do not fit, DataError for prompts that do not fit the model.
    """

    def __init__(
        self, step: Any, prompts: Sequence[Prompt], reward: Any, cfg: RolloutConfig, tokenizer: Tokenizer, *, method: str = "grpo",
        stop: Sequence[int] = (), seed: int = 0, generator: Network | None = None, reference: Network | None = None,
        directory: Path | None = None, oldest: Callable[[], int] = lambda: 0, emit: Callable[..., None] = lambda *_, **fields: None,
    ) -> None:  # fmt: skip
        super().__init__(step, cfg.prompts * cfg.num_generations // cfg.num_mini_batches, cfg.pad_to, seed)
        self.prompts, self.reward, self.cfg, self.tokenizer = prompts, reward, cfg, tokenizer
        self.method, self.stop = method, [*stop]
        self.network = Network(step.model, step.pipeline) if generator is None else generator
        self.has_copy, self.reference, self.emit, self.oldest = generator is not None, reference, emit, oldest
        self.directory = None if directory is None else directory / "rollouts"
        self.files_axis = step.mesh.background_axis("replicate") if cfg.staleness else self.replicas
        self._check()
        self.batch_size = self.rows
        self.steps = cfg.num_mini_batches * cfg.num_ppo_epochs  # of an iteration
        self.iterations = min(cfg.epoch or len(prompts), len(prompts)) // cfg.prompts  # of an epoch
        self.samples, self.dataset_size = self.iterations * self.steps * self.batch_size, len(prompts)
        digest = sha256(repr([(prompt.tokens, sorted(prompt.columns.items())) for prompt in prompts]).encode())
        self.identity = f"prompts {digest.hexdigest()[:16]}"
        self._engine: Any = None
        self._stream = torch.cuda.Stream() if cfg.staleness and step.mesh.device.type == "cuda" else None
        self._copied = self._has_begun = False
        self._pending: dict[int, Future[dict[str, Tensor]]] = {}
        self._answers: dict[int, tuple[str, str, float]] = {}
        self._uniform, self._failures, self._kl, self._train_seconds = [0, 0], 0, (0.0, 0), 0.0

    def _check(self) -> None:
        cfg, parts = self.cfg, self.cfg.num_mini_batches * self.replicas.size
        if self.method not in _ADVANTAGES:
            raise ConfigError(f"there are no advantages {self.method!r}; expected one of {', '.join(sorted(_ADVANTAGES))}")
        if cfg.prompts % parts:
            problem = f"rollout.prompts is {cfg.prompts}, no multiple of {parts}: rollout.num_mini_batches times replicas"
            raise ConfigError(f"{problem}; take a multiple of {parts}")
        if len(self.prompts) < cfg.prompts:
            raise ConfigError(f"there are {len(self.prompts)} prompts, rollout.prompts is {cfg.prompts}; take fewer, or more data")
        if self.method != "ppo" and cfg.num_generations < 2:
            problem = f"rollout.num_generations is {cfg.num_generations}, and {self.method} compares those of a prompt"
            raise ConfigError(f"{problem}; take 2 or more")
        if self.method == "ppo" and (not isinstance(self.step.model, ActorCritic) or self.reference is None):
            raise ConfigError("ppo needs a step with an ActorCritic, and a reference; give both")
        if cfg.staleness and not self.has_copy:
            raise ConfigError("rollout.staleness is 1, which needs a generator with weights of its own; give one")
        if cfg.staleness and active_pipeline(policy_of(self.network.model), self.network.pipeline) is not None:
            raise ConfigError("rollout.staleness is 1, but a pipeline has one schedule; set it to 0, or mesh.pipeline to 1")
        self.check_vocabulary(reference=self.reference, reward_model=self.reward)
        self._check_prompts(self.prompts)

    def _check_prompts(self, prompts: Sequence[Prompt]) -> None:
        model, names = policy_of(self.step.model), [prompt.where for prompt in prompts]
        check_prompts([prompt.tokens for prompt in prompts], model.cfg.vocabulary, model.cfg.max_length, names.__getitem__)

    # ---- the interface of a loader

    def __len__(self) -> int:
        return self.iterations * self.steps

    def epoch(self, epoch: int, first: int = 0, deferred: Sequence[int] = (), more: bool = False) -> Iterator[RolloutBatch]:
        done, begin = divmod(first // self.batch_size, self.steps)
        for index in range(done, self.iterations):
            iteration = epoch * self.iterations + index
            rows = self._take(iteration, begin > 0)
            batch = self._with_advantages(rows, iteration, resumed=begin > 0)
            began = time.perf_counter()
            for number in range(begin, self.steps):
                if number + 1 == self.steps:
                    self._adapt_kl()  # before the last step, after which a checkpoint has the coefficient of the next iteration
                yield self._part(batch, number % self.cfg.num_mini_batches)
            begin, self._train_seconds = 0, time.perf_counter() - began

    def describe(self, epoch: int, first: int) -> str:
        done, number = divmod(first // self.batch_size, self.steps)
        iteration = epoch * self.iterations + done
        places = self._places(number % self.cfg.num_mini_batches)
        names = [self.prompts[self._order(iteration)[place]].where for place in places]
        return f"iteration {iteration}, prompts {', '.join([*names[:4], *['...'] * (len(names) > 4)])}"

    def deferred(self) -> list[int]:
        """Wait for the files that resuming from a checkpoint of this step needs, and delete those that no checkpoint needs."""
        self._wait()
        if self.directory is not None and self.step.mesh.is_first:
            oldest = self.oldest() // self.steps - 1
            for path in self.directory.glob("*.safetensors"):
                if path.stem.isdecimal() and int(path.stem) < oldest:
                    path.unlink(missing_ok=True)
        return []

    def _wait(self) -> None:
        """Wait until nothing is sampled."""
        with waiting_at("rollouts", is_work=True):
            for future in self._pending.values():
                future.result()

    def news(self) -> list[str]:
        (uniform, prompts), self._uniform, news = self._uniform, [0, 0], list[str]()
        if uniform:
            news.append(f"{uniform} of {prompts} prompts had answers with equal rewards, which have no gradient")
        if isinstance(count := getattr(self.reward, "failures", 0), int) and count > self._failures:
            news.append(f"{count - self._failures} rewards failed and are 0; the last: {self.reward.last_failure}")
            self._failures = count
        return news

    # ---- evaluation

    def validation(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        """Return batches of the indices of held-out prompts of this replica, for ``score``. Raises DataError as the constructor."""
        self._held_out = prompts
        self._check_prompts(prompts)
        mine = torch.arange(len(prompts))[self.replicas.rank :: self.replicas.size]
        if len(prompts) < self.replicas.size:
            raise DataError(f"{len(prompts)} prompts to evaluate, fewer than {self.replicas.size} replicas; take more")
        return [*mine.split(max(self.cfg.sizes.max_num_seqs, 1))]

    def score(self, model: Any, indices: Tensor) -> dict[str, Any]:
        """Return the mean ``reward``, the fraction ``solved`` with a reward of 1 or more, and the ``length`` in tokens, of answers
        to held-out prompts, each as (sum, count): a metric of ``fit``."""
        self._wait()
        prompts = [self._held_out[n] for n in indices.tolist()]
        self._copy_weights()
        outputs = self._generate([prompt.tokens for prompt in prompts], self.cfg.validation, indices.tolist())
        rewards = self._rewards(prompts, outputs)
        for n, prompt, (tokens, _), reward in zip(indices.tolist(), prompts, outputs, rewards):
            self._answers[n] = prompt.text, self.tokenizer.decode(tokens, skip_special=True), reward
        count, lengths = len(prompts), [float(len(tokens)) for tokens, _ in outputs]
        sums = torch.tensor([sum(rewards), sum(r >= 1 for r in rewards), sum(lengths)], dtype=torch.float64)
        return {name: (value, torch.tensor(float(count))) for name, value in zip(("reward", "solved", "length"), sums)}

    @property
    def last_answers(self) -> list[tuple[str, str, float]]:
        """Held-out prompts of this replica, their last answers, and rewards."""
        return [self._answers[n] for n in sorted(self._answers)]

    # ---- an iteration

    def _order(self, iteration: int) -> list[int]:
        """Return the indices of the prompts of an iteration, over all replicas."""
        of_all, size = divmod(iteration, len(self.prompts) // self.cfg.prompts), self.cfg.prompts
        return self.order(of_all[0], len(self.prompts))[of_all[1] * size : (of_all[1] + 1) * size]

    def _places(self, update: int | None = None) -> list[int]:
        """Return the places, in the order of an iteration, of the prompts of this replica, in one update or in all."""
        each = self.cfg.prompts // self.cfg.num_mini_batches
        mine = each // self.replicas.size
        updates = range(self.cfg.num_mini_batches) if update is None else [update]
        return [u * each + self.replicas.rank * mine + n for u in updates for n in range(mine)]

    def _take(self, iteration: int, resumed: bool) -> dict[str, Tensor]:
        """Return the answers of an iteration, and with staleness begin to sample those of the next one."""
        stale, following = self.cfg.staleness == 1, iteration + 1
        was_stale, self._has_begun = stale and not self._has_begun and iteration > 0, True
        if (future := self._pending.pop(iteration, None)) is not None:
            with waiting_at("rollouts", is_work=True):
                rows = future.result()
        elif (saved := self._load(iteration, resumed) if resumed or was_stale else None) is not None:
            rows = saved
        else:
            self._copy_weights()
            rows = self._sample(iteration)
        if stale:  # also after the last iteration, since a longer run may resume
            if (saved := self._load(following, False) if resumed else None) is not None:
                self._pending[following] = Future()
                self._pending[following].set_result(saved)
            else:
                self._copy_weights()
                ready = torch.cuda.current_stream().record_event() if self._stream else None
                self._pending[following] = submit(partial(self._sample_aside, following, ready), "rollouts")
        return rows

    def _sample_aside(self, iteration: int, ready: Any) -> dict[str, Tensor]:
        """Sample in a thread, on a GPU by a stream of its own, after the event ``ready``."""
        with torch.cuda.stream(self._stream):  # a no-op if None
            if self._stream is not None:
                self._stream.wait_event(ready)
            return self._sample(iteration)

    @torch.no_grad()
    def _copy_weights(self) -> None:
        """Copy the weights of the step into the generator, one at a time; frozen ones once."""
        self.step.reducer.wait()
        if not self.has_copy:
            return
        trained = {name for name, parameter in self.step.model.named_parameters() if parameter.requires_grad}
        target = self.network.model.state_dict()
        for name, value in self.step.model.state_dict().items():
            if name in target and (name in trained or not self._copied):
                target[name].copy_(value.full_tensor() if hasattr(value, "full_tensor") else value)
        self._copied = True

    @torch.no_grad()
    def _sample(self, iteration: int) -> dict[str, Tensor]:
        """Sample and score the answers of an iteration on this replica.   [N, ...] each"""
        began, cfg, places, order = time.perf_counter(), self.cfg, self._places(), self._order(iteration)
        rows = [(order[place], place * cfg.num_generations + n) for place in places for n in range(cfg.num_generations)]
        prompts = [self.prompts[index] for index, _ in rows]
        seeds = [_seed(self.seed, iteration, place) for _, place in rows]
        outputs = self._generate([prompt.tokens for prompt in prompts], cfg.sampling, seeds)
        generated = time.perf_counter()
        length = max(len(prompt.tokens) + len(tokens) for prompt, (tokens, _) in zip(prompts, outputs))
        fields = {
            "place": torch.tensor([place for _, place in rows]),
            "tokens": torch.zeros(len(rows), length, dtype=torch.int64),
            "loss_mask": torch.zeros(len(rows), length, dtype=torch.bool),
            "engine_log_probs": torch.zeros(len(rows), length - 1, dtype=torch.float64),
        }
        for row, (prompt, (tokens, of_tokens)) in enumerate(zip(prompts, outputs)):
            begin, end = len(prompt.tokens), len(prompt.tokens) + len(tokens)
            fields["tokens"][row, :end] = torch.tensor([*prompt.tokens, *tokens])
            fields["loss_mask"][row, begin:end] = True
            fields["engine_log_probs"][row, begin - 1 : end - 1] = torch.tensor(of_tokens, dtype=torch.float64)
        fields["ended"] = torch.tensor([tokens[-1] in self.stop for tokens, _ in outputs])
        policy = Network(policy_of(self.network.model), self.network.pipeline)
        log_probs = partial(token_log_probs, temperature=cfg.sampling.temperature)
        fields["old_log_probs"] = self.compute(policy, log_probs, fields)
        if self.reference is not None:
            fields["reference_log_probs"] = self.compute(self.reference, log_probs, fields)
        if self.method == "ppo":
            fields["old_values"] = self.compute(Network(self.network.model.critic), token_values, fields)
        rewards = self.compute(self.reward, answer_rewards, fields, True) if isinstance(self.reward, Network) else None
        fields["rewards"] = torch.tensor(self._rewards(prompts, outputs)).double() if rewards is None else rewards.double()
        fields["seconds"] = torch.tensor([[generated - began, time.perf_counter() - generated]]).double().expand(len(rows), 2)
        if cfg.staleness or self.steps > 1:
            self._save(iteration, fields)
        return fields

    def _generate(
        self, prompts: Sequence[Sequence[int]], cfg: SamplingConfig, seeds: Sequence[int]
    ) -> list[tuple[list[int], list[float]]]:
        with self.step.autocast():
            while True:
                if self._engine is None:
                    self._engine = self._new_engine()
                self._engine.update(policy_of(self.network.model))
                try:
                    return self._engine.generate(prompts, cfg, seeds, self.stop)
                except torch.OutOfMemoryError as error:
                    self._shrink(error)

    def _new_engine(self) -> Any:
        model, sizes, cfg = policy_of(self.network.model), self.cfg.sizes, self.cfg
        if cfg.engine == "vllm":
            from hpcai.models.llm.engine.vllm import VLLMEngine

            return VLLMEngine(model, sizes)
        if sizes.cache_tokens is None:
            most = max(cfg.sampling.most, cfg.validation.most)
            longest = min(max(len(prompt.tokens) for prompt in self.prompts) + most, model.cfg.max_length)
            tokens = sizes.max_num_seqs * -(-longest // sizes.block_size) * sizes.block_size
            sizes = sizes.model_copy(update={"cache_tokens": tokens})
        kwargs: dict[str, Any] = {"pipeline": self.network.pipeline, "capture": not cfg.staleness}  # a thread captures no graph
        return Engine(model, sizes, vocab_size=self.tokenizer.size, **kwargs)

    def _shrink(self, error: Exception) -> None:
        """Halve the number of texts of the engine, which is out of memory."""
        sizes = self.cfg.sizes
        if self.step.mesh.model_parallel.size > 1 or sizes.max_num_seqs == 1:
            text = f"the generation engine is out of memory with {sizes.max_num_seqs} texts at a time"
            raise ConfigError(f"{text}; set rollout.sizes.max_num_seqs to fewer, or cache_tokens") from error
        fewer = sizes.model_copy(update={"max_num_seqs": sizes.max_num_seqs // 2})
        self.cfg, self._engine = self.cfg.model_copy(update={"sizes": fewer}), None
        logger.warning("the generation engine is out of memory: %d texts at a time from now on", fewer.max_num_seqs)

    def _rewards(self, prompts: Sequence[Prompt], outputs: Sequence[tuple[list[int], list[float]]]) -> list[float]:
        names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
        columns = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
        answers = [self.tokenizer.decode(tokens, skip_special=True) for tokens, _ in outputs]
        if isinstance(self.reward, Network):
            raise ConfigError("answers are evaluated by a function or a program, and the reward is a model; give no validation")
        return self.reward([prompt.text for prompt in prompts], answers, columns)

    # ---- advantages

    def _with_advantages(self, rows: dict[str, Tensor], iteration: int, resumed: bool) -> dict[str, Tensor]:
        """Return the fields of a ``RolloutBatch`` of all answers of an iteration, and report it."""
        rewards, mask = rows["rewards"], rows["loss_mask"][:, 1:]
        groups, uniform, kl = rewards.view(-1, self.cfg.num_generations), 0, torch.zeros(())
        if self.reference is not None:
            kl = (rows["old_log_probs"] - rows["reference_log_probs"]).where(mask, 0).sum()
        if self.method == "ppo":
            beta = float(self.step.model.kl_beta)
            of_tokens = kl_rewards(rewards, rows["old_log_probs"], rows["reference_log_probs"], mask, beta)
            advantages, rows["returns"] = gae(of_tokens, rows["old_values"], mask, self.cfg.gamma, self.cfg.lam)
            rows["advantages"] = whiten(advantages, mask, all_reduce_(moments(advantages, mask), self.replicas))
        else:
            scale = "group" if self.cfg.scale_rewards == "group" and self.method == "grpo" else "none"
            values, uniform = leave_one_out(groups) if self.method == "rloo" else group_advantages(groups, scale)  # type: ignore[arg-type]
            if self.method == "grpo" and self.cfg.scale_rewards == "batch":
                everything = torch.ones_like(rewards, dtype=torch.bool)
                count, total, squares = all_reduce_(moments(rewards, everything), self.replicas)
                values = values / (((squares - total.square() / count) / (count - 1)).clamp(min=0).sqrt() + 1e-4)
            rows["advantages"] = values.view(-1, 1).to(rows["old_log_probs"].dtype)
        seconds = rows["seconds"][0].tolist()
        numbers: list[Any] = [len(rewards), rewards.sum(), (rewards >= 1).sum(), mask.sum(), rows["ended"].sum(), kl, uniform]
        local = torch.tensor([*map(float, numbers), *(s / self.replicas.size for s in seconds)], dtype=torch.float64)
        sums = dict(zip(_STATS, all_reduce_(local.to(self.step.mesh.device), self.replicas).tolist()))
        self._kl = sums["kl"] / sums["answers"], round(sums["answers"])
        if not resumed:
            self._report(iteration, rows, sums)
        return rows

    def _report(self, iteration: int, rows: Mapping[str, Tensor], sums: dict[str, float]) -> None:
        answers = sums["answers"]
        numbers = {name: sums[name] / answers for name in ("reward", "solved", "tokens", "ended", "kl")}
        seconds = {name: sums[name] for name in _STATS[-2:]} | {"train_seconds": self._train_seconds}
        order, samples = self._order(iteration), list[dict[str, Any]]()
        for row in range(min(self.cfg.samples, len(rows["tokens"]))):
            tokens = rows["tokens"][row][rows["loss_mask"][row]].tolist()
            prompt = self.prompts[order[int(rows["place"][row]) // self.cfg.num_generations]]
            reward = float(rows["rewards"][row])
            samples.append({"prompt": prompt.text, "answer": self.tokenizer.decode(tokens, skip_special=True), "reward": reward})
        uniform = round(sums["uniform_groups"])
        self.emit(
            "rollout", step=iteration * self.steps, iteration=iteration, answers=round(answers), uniform_groups=uniform,
            **numbers, **seconds, samples=samples,
        )  # fmt: skip
        self._uniform = [self._uniform[0] + uniform, self._uniform[1] + self.cfg.prompts]

    def _adapt_kl(self) -> None:
        if self.method == "ppo":
            controller = KLController(self.cfg.kl)
            controller.beta = float(self.step.model.kl_beta)
            controller.update(*self._kl)
            self.step.model.kl_beta.fill_(controller.beta)

    def _part(self, batch: Mapping[str, Tensor], update: int) -> RolloutBatch:
        """Return the answers of an update, padded to a common length, on the device."""
        size, device = len(batch["tokens"]) // self.cfg.num_mini_batches, self.step.mesh.device
        fields = {name: batch[name][update * size : (update + 1) * size] for name in RolloutBatch._fields if name in batch}
        length = self.round_length(int(fields["loss_mask"].any(0).nonzero().max()))
        dtype = fields["old_log_probs"].dtype
        for name, value in fields.items():
            if value.ndim == 2 and value.shape[1] > 1:
                value = fit_columns(value, length + (name in ("tokens", "loss_mask")))
            fields[name] = value.to(device, dtype if value.is_floating_point() else value.dtype)
        return RolloutBatch(**fields)

    # ---- files

    def _save(self, iteration: int, fields: dict[str, Tensor]) -> None:
        """Write the answers of an iteration, of all replicas, beside the checkpoints."""
        if self.directory is None or self.step.mesh.model_parallel.rank:
            return
        parts = gather_to_first(fields, self.files_axis)
        if parts:
            merged = {}
            for name in fields:
                pieces = [part[name] for part in parts]
                widest = max(piece.shape[-1] for piece in pieces)
                merged[name] = torch.cat([fit_columns(piece, widest) if piece.ndim == 2 else piece for piece in pieces])
            self.directory.mkdir(parents=True, exist_ok=True)
            path = self._path(iteration)
            save_file(merged, path.with_suffix(".partial"))
            path.with_suffix(".partial").replace(path)

    def _load(self, iteration: int, required: bool) -> dict[str, Tensor] | None:
        """Return the answers of this replica in the file of an iteration, or None. Raises DataError if they are required, and for
        those of other sizes."""
        if self.directory is None or not broadcast_from_first(lambda: self._path(iteration).is_file(), self.step.mesh.peers):
            if required:
                raise DataError(f"{self._path(iteration)}: is missing, and the run resumes between its steps; put it back")
            return None
        try:
            fields = load_file(self._path(iteration))
        except (OSError, SafetensorError) as problem:
            raise DataError(f"{self._path(iteration)}: cannot be read ({problem}); resume from another checkpoint") from problem
        rows = {place: row for row, place in enumerate(fields["place"].tolist())}
        wanted = [place * self.cfg.num_generations + n for place in self._places() for n in range(self.cfg.num_generations)]
        if len(rows) != self.cfg.prompts * self.cfg.num_generations:
            text = f"{self._path(iteration)}: has {len(rows)} answers, expected rollout.prompts times num_generations"
            raise DataError(f"{text}, {self.cfg.prompts * self.cfg.num_generations}; resume with the same")
        return {name: value[[rows[place] for place in wanted]] for name, value in fields.items()}

    def _path(self, iteration: int) -> Path:
        return (self.directory or Path()) / f"{iteration:08d}.safetensors"


def policy_of(model: Any) -> Any:
    """Return the language model of an ``ActorCritic``, or the model."""
    return model.policy if isinstance(model, ActorCritic) else model


def _seed(*numbers: int) -> int:
    digest = blake2b(" ".join(map(str, numbers)).encode(), digest_size=8)
    return int.from_bytes(digest.digest()) >> 1


def fit_columns(x: Tensor, columns: int) -> Tensor:
    """Return the first ``columns`` columns, padded with 0.   [N, T] -> [N, columns]"""
    return F.pad(x, (0, columns - x.shape[1]))
