"""The generation engine beside batches that end with their longest text, of ours and of transformers, in CPU seconds of one run."""

import random
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcai.dist.mesh import Mesh
from hpcai.models import llm
from hpcai.models.llm.engine.quantization import QuantizedLayers
from hpcai.models.llm.families import hub_config
from hpcai.models.llm.gathered import override_attributes
from hpcai.settings import StepConfig
from hpcai.train import Step

pytestmark = pytest.mark.timing
SIZES = {"vocabulary": 2048, "width": 320, "layers": 6, "heads": 5, "inner": 864, "positions": 1024}
TEXTS, BATCH = 64, 8


def test_texts_of_unequal_lengths_end_sooner_than_in_batches(quiet_hugging_face: None) -> None:
    """Prompts of 16 to 127 tokens, and new ones with a heavy tail: 8 or more, 79 on average, 768 at most. The cache has less than
    4 % of empty entries."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: its generate is NOT compared")
    torch.manual_seed(0)
    model, draw = llm.LLM(llm.LLMConfig(**SIZES)).eval(), random.Random(0)
    peer = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**hub_config(model.cfg, torch.float32)))
    lengths = [min(768, int(8 * draw.paretovariate(0.8))) for _ in range(TEXTS)]
    prompts = [[draw.randrange(1, 2048) for _ in range(draw.randrange(16, 128))] for _ in range(TEXTS)]
    batches = [slice(at, at + BATCH) for at in range(0, TEXTS, BATCH)]

    def in_batches() -> None:
        for batch in batches:
            llm.complete(model, prompts[batch], llm.SamplingConfig(most=max(lengths[batch])))

    def by_transformers() -> None:
        for batch in batches:
            longest, new = max(map(len, prompts[batch])), max(lengths[batch])
            ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts[batch]])
            mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts[batch]])
            with torch.no_grad():
                kwargs = {"attention_mask": mask, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
                peer.eval().generate(ids, do_sample=False, **kwargs)

    def by_engine(texts: int) -> float:
        engine, empty, used = llm.Engine(model, llm.EngineConfig(max_num_seqs=texts)), 0, 0
        for prompt, length in zip(prompts, lengths):
            engine.add(llm.Request(prompt, llm.SamplingConfig(most=length)))
        while engine.unfinished:
            engine.step()
            running = engine.schedulers[0].running
            used += sum(len(request.blocks) * engine.cfg.block_size for request in running)
            empty += sum(len(request.blocks) * engine.cfg.block_size - request.computed for request in running)
        return empty / used

    assert by_engine(BATCH) < 0.04
    seconds = {name: _seconds(run) for name, run in (
        ("batches", in_batches), ("transformers", by_transformers), ("engine, 8 texts", lambda: by_engine(BATCH)),
        ("engine, 32 texts", lambda: by_engine(32)))}  # fmt: skip
    print(f"\n{sum(lengths)} tokens: " + ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items()))
    assert seconds["engine, 8 texts"] * 2 < seconds["transformers"]
    assert seconds["engine, 32 texts"] * 2 < seconds["batches"]


def test_generation_takes_less_of_an_iteration_of_grpo_by_the_engine() -> None:
    """16 prompts with 8 answers each, whose lengths are geometric: 256 tokens on average, 448 at most. Random weights."""
    torch.manual_seed(0)
    tokenizer = llm.Tokenizer.byte_level()
    model = llm.LLM(llm.LLMConfig(vocabulary=257, width=256, layers=4, heads=4, inner=688, positions=512))
    step = Step(model.train(), llm.policy_loss, StepConfig(lr=1e-5, accumulate=16), Mesh({}))
    prompts = [llm.Prompt(text, tokenizer.encode(text), {}) for text in (f"question {n}: " for n in range(16))]
    sampling = llm.SamplingConfig(temperature=1.0, most=448)
    cfg = llm.RolloutConfig(prompts=16, num_generations=8, sampling=sampling, sizes=llm.EngineConfig(max_num_seqs=32), pad_to=64)
    reward = llm.Rewards(llm.RewardConfig(), lambda prompts, completions: [len(text) % 2 for text in completions])
    batches = llm.Rollouts(step, prompts, reward, cfg, tokenizer, stop=[256])
    inputs, seeds = [prompt.tokens for prompt in prompts for _ in range(8)], [*range(128)]
    engine = _seconds(lambda: batches._generate(inputs, sampling, seeds))
    batches_of_32 = [slice(n, n + 32) for n in range(0, 128, 32)]
    static = _seconds(lambda: [llm.complete(model, inputs[each], sampling, [256], seeds[each]) for each in batches_of_32])
    iteration = _seconds(lambda: step(next(iter(batches.epoch(0)))))
    shares = [seconds / (iteration - engine + seconds) for seconds in (static, engine)]
    print(f"\nan iteration {iteration:.1f} s, generation {static:.1f} -> {engine:.1f} s, shares {shares[0]:.2f} -> {shares[1]:.2f}")
    assert shares[1] < shares[0]


def test_few_texts_decode_faster_with_quantized_weights() -> None:
    """8 layers of 1,024 channels in bfloat16 on one thread: prompts of 8 tokens and 48 new ones."""
    torch.manual_seed(0)
    model = llm.LLM(llm.LLMConfig(vocabulary=2048, width=1024, layers=8, heads=16, inner=2816, positions=64)).bfloat16().eval()
    kinds: Any = ("none", "int8", "int4")
    engines = {kind: llm.Engine(model, llm.EngineConfig(max_num_seqs=8, quantization=kind)) for kind in kinds}
    times: dict[tuple[str, int], list[float]] = {}
    for _, (kind, texts) in product(range(5), product(kinds, (1, 8))):
        requests = [llm.Request([*range(text, text + 8)], llm.SamplingConfig(most=48)) for text in range(texts)]
        seconds = _seconds(lambda: [*engines[kind].run(requests)])  # noqa: B023
        times.setdefault((kind, texts), []).append(seconds / 48 * 1000)
    milliseconds = {key: median(values) for key, values in times.items()}
    print(f"\nms a step: {', '.join(f'{kind}, {texts} texts {ms:.1f}' for (kind, texts), ms in milliseconds.items())}")
    assert max(milliseconds["int8", 1], milliseconds["int4", 1]) < 0.8 * milliseconds["none", 1]
    assert max(milliseconds["int8", 8], milliseconds["int4", 8]) < 1.2 * milliseconds["none", 8]


def test_quantized_weights_of_a_trained_model_change_its_loss_little() -> None:
    """4 layers of 192 channels, trained for a minute on the pages of this project, in bytes."""
    torch.manual_seed(0)
    text = b"".join(path.read_bytes() for path in sorted((Path(__file__).parents[2] / "docs").glob("*.md")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    training, held_out = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :][: 64 * 129].view(64, 129)
    model = llm.LLM(llm.LLMConfig(vocabulary=256, width=192, layers=4, heads=6, inner=512, positions=128))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
    for step in range(400):
        optimizer.param_groups[0]["lr"] = 4e-3 * min(step / 30, 1 - step / 400)
        rows = torch.stack([training[at : at + 129] for at in torch.randint(len(training) - 129, (8,))])
        optimizer.zero_grad()
        (llm.loss(model, llm.Batch(rows))["loss"][0] / rows[:, 1:].numel()).backward()
        optimizer.step()
    full, cross_entropy = _evaluate(model.eval(), held_out)
    print(f"\nloss {cross_entropy:.4f} nats a byte")
    errors = []
    for kind, group in (("int4", 192), ("int4", 64), ("int4", 32), ("int8", 192)):
        cfg: Any = llm.EngineConfig(quantization=kind, quantization_group_size=group)
        with override_attributes(QuantizedLayers(model, cfg).refresh()):
            logits, other = _evaluate(model, held_out)
        errors.append(float((logits - full).norm() / (full - full.mean((0, 1))).norm()))
        print(f"{kind}, groups of {group}: logits {100 * errors[-1]:.2f} %, loss {other - cross_entropy:+.5f}")
        assert abs(other - cross_entropy) < 0.02
    assert errors == sorted(errors, reverse=True)


@torch.no_grad()
def _evaluate(model: llm.LLM, rows: Tensor) -> tuple[Tensor, float]:
    """Return logits and the cross entropy of a token, in nats."""
    logits = model(rows[:, :-1])
    return logits, float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))


def _seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start
