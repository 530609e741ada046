"""Text samples of a run for its report: bits per byte beside compressors, loss by position, continued texts.

N rows of T targets
"""

import gzip
import lzma
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apps.llm.settings import Config
from hpcai import dist, train
from hpcai.models.llm import SamplingConfig, Tokenizer, complete
from hpcai.models.llm.tokenizer import tokenizer_files

_TEXTS, _PROMPT_TOKENS, _NEW_TOKENS = 6, 64, 128  # continued texts, prompt tokens and generated tokens of each
_SAMPLING = SamplingConfig(most=_NEW_TOKENS, temperature=0.8, top_p=0.95)


def save_tokenizer(run: train.Run, cfg: Config, model: Any) -> None:
    """Copy the tokenizer of the rows into the folder of the run, which can then generate text, and give it to the model."""
    if run.mesh.is_first:
        model.tokenizer = Tokenizer.load(cfg.data.directory)
    for name, file in tokenizer_files(cfg.data.directory).items():
        run.write_file(name, partial(shutil.copyfile, file))


def save_texts(run: train.Run, cfg: Config, step: train.Step, rows: dict[str, Tensor]) -> None:
    """Write ``text.npz`` from the rows of ``entropies``, which rank 0 has. All ranks call this together."""
    tokenizer = Tokenizer.load(cfg.data.directory)
    some = rows["tokens"][:: max(1, len(rows["tokens"]) // _TEXTS)][:_TEXTS].tolist() if rows else []
    some = dist.broadcast_object(some, step.mesh.peers)
    length = min(_PROMPT_TOKENS, len(some[0]) // 2)
    with step.average.applied(), step.autocast():
        ends = [] if tokenizer.eos is None else [tokenizer.eos]
        prompts = [row[:length] for row in some]
        outputs = complete(step.model, prompts, _SAMPLING, ends, vocab_size=tokenizer.size, pipeline=step.pipeline)
    if not rows:
        return
    texts = [list(map(tokenizer.decode, (r[:length], new, r[length : length + _NEW_TOKENS]))) for r, new in zip(some, outputs)]
    run.write_file("text.npz", lambda path: write_texts(path, rows, measure_codes(rows, tokenizer), texts))


def measure_codes(rows: dict[str, Tensor], tokenizer: Tokenizer) -> dict[str, float]:
    """Return the bits per byte of rows by the model, compressors and frequencies of tokens; {} if not all tokens are scored."""
    tokens, nats = rows["tokens"].numpy(), rows["nats"].double()
    if not rows["counted"].all():
        return {}
    targets = tokens[:, 1:].ravel()
    text = tokenizer.decode(targets.tolist(), skip_special=True).encode()
    count = int(tokenizer.byte_lengths[targets].sum())
    return {
        "tokens' frequencies": adaptive_code_bits(targets, tokenizer.size) / count,
        "gzip -9": 8 * len(gzip.compress(text, 9)) / len(text),
        "xz -9e": 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text),
        "this model": float(nats.sum()) / math.log(2) / count,
    }


def adaptive_code_bits(tokens: np.ndarray, size: int) -> float:
    """Return the bits of ``tokens`` [N] in an adaptive code: the probability of the n-th is (count so far + 1/2) / (n + size/2)
    (Krichevsky and Trofimov 1981)."""
    counts = torch.from_numpy(np.bincount(tokens, minlength=size)).double()
    half = torch.full((), 0.5).double()
    together = torch.lgamma(counts + half).sum() - size * torch.lgamma(half)
    return float(torch.lgamma(counts.sum() + size / 2) - torch.lgamma(size * half) - together) / math.log(2)


def write_texts(path: Path, rows: dict[str, Tensor], codes: dict[str, float], texts: list[list[str]]) -> None:
    """Write mean losses by position [T] in nats, names and bits/byte of codes [K], texts [M, 3]: prompt, generated, true, and the
    load of each expert [layers, experts] in tokens, if the model has some."""
    counted = rows["counted"].double()
    by_position: Any = rows["nats"].double().sum(0) / counted.sum(0).clamp(min=1)
    load: dict[str, Any] = {"load": rows["load"].double().sum(0).numpy()} if "load" in rows else {}
    np.savez_compressed(
        path, **load, positions=by_position.numpy(), counts=counted.sum(0).long().numpy(), names=np.array([*codes], str),
        bits=np.array([*codes.values()]), texts=np.array(texts, str).reshape(-1, 3),
    )  # fmt: skip
