"""The generation engine beside batches that end with their longest text, of ours and of transformers, in CPU seconds of one run."""

import random
import time
from collections.abc import Callable

import pytest
import torch

from hpcai.models.llm import LLM, Engine, EngineConfig, LLMConfig, Request, SamplingConfig, complete
from hpcai.models.llm.families import hub_config

pytestmark = pytest.mark.timing
SIZES = {"vocabulary": 2048, "width": 320, "layers": 6, "heads": 5, "inner": 864, "positions": 1024}
TEXTS, BATCH = 64, 8


def test_texts_of_unequal_lengths_end_sooner_than_in_batches(quiet_hugging_face: None) -> None:
    """Prompts of 16 to 127 tokens, and new ones with a heavy tail: 8 or more, 79 on average, 768 at most. The cache has less than
    4 % of empty entries."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: its generate is NOT compared")
    torch.manual_seed(0)
    model, draw = LLM(LLMConfig(**SIZES)).eval(), random.Random(0)
    peer = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**hub_config(model.cfg, torch.float32)))
    lengths = [min(768, int(8 * draw.paretovariate(0.8))) for _ in range(TEXTS)]
    prompts = [[draw.randrange(1, 2048) for _ in range(draw.randrange(16, 128))] for _ in range(TEXTS)]
    batches = [slice(at, at + BATCH) for at in range(0, TEXTS, BATCH)]

    def in_batches() -> None:
        for batch in batches:
            complete(model, prompts[batch], SamplingConfig(most=max(lengths[batch])))

    def by_transformers() -> None:
        for batch in batches:
            longest, new = max(map(len, prompts[batch])), max(lengths[batch])
            ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts[batch]])
            mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts[batch]])
            with torch.no_grad():
                kwargs = {"attention_mask": mask, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
                peer.eval().generate(ids, do_sample=False, **kwargs)

    def by_engine(texts: int) -> float:
        engine, empty, used = Engine(model, EngineConfig(max_num_seqs=texts)), 0, 0
        for prompt, length in zip(prompts, lengths):
            engine.add(Request(prompt, SamplingConfig(most=length)))
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


def _seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start
