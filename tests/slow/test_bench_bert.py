"""Forward and backward passes of packed rows beside those of transformers with padded ones, in CPU seconds of one run."""

import time
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from data_prep.bert import pack
from hpcai.models.bert import Batch, Bert, BertConfig, loss

pytestmark = pytest.mark.timing
VOCABULARY, WIDTH = 2544, 512  # a twelfth of BERT's, as are the layers
MIXED = [512, 256, 256, 171, 171, 170]  # as many rows of one sequence as of three, two sequences in a row on average (MLPerf)


def make_batches(lengths: list[int]) -> tuple[Batch, dict[str, torch.Tensor]]:
    """Return the same sequences in packed rows, and padded."""
    random, rows = np.random.default_rng(0), pack(lengths, WIDTH, 3)
    shape, most = (len(lengths), WIDTH), 3
    ids, labels, nsp = random.integers(5, VOCABULARY, shape), np.full(shape, -100), random.integers(0, 2, len(lengths))
    packed = [np.full((len(rows), n), fill) for n, fill in ((WIDTH, 0), (most, 0), (80, 0), (80, -1), (most, -1))]
    for row, members in enumerate(rows):
        begin = masked = 0
        for column, index in enumerate(members):
            length = lengths[index]
            chosen = np.sort(random.choice(length, round(0.15 * length), replace=False))
            labels[index, chosen], ids[index, length:] = ids[index, chosen], 0
            packed[0][row, begin : begin + length] = ids[index, :length]
            packed[1][row, column], packed[4][row, column] = length, nsp[index]
            packed[2][row, masked : masked + len(chosen)] = begin + chosen
            packed[3][row, masked : masked + len(chosen)] = ids[index, chosen]
            begin, masked = begin + length, masked + len(chosen)
    tokens, sizes, masks, targets, following = map(torch.from_numpy, packed)
    ours = Batch(tokens, sizes, masks, targets, None, following)
    arrays = {"input_ids": ids, "attention_mask": (ids > 0).astype(int), "labels": labels, "next_sentence_label": nsp}
    return ours, {name: torch.from_numpy(array) for name, array in arrays.items()}


@pytest.mark.parametrize("dropout", [0.1, 0.0])
@pytest.mark.parametrize(("lengths", "bound"), [(MIXED, 1.8), ([WIDTH] * 3, 1.0)], ids=["mixed", "equal"])
def test_packed_rows_are_faster_than_padded_ones(lengths: list[int], bound: float, dropout: float) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: its BERT is NOT compared")
    cfg = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=1024, num_hidden_layers=2, num_attention_heads=16, intermediate_size=4096,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    peer, ours = transformers.BertForPreTraining(cfg).train(), Bert(BertConfig(
        vocabulary=VOCABULARY, layers=2, dropout=dropout, attention_dropout=dropout
    ))  # fmt: skip
    state = {name: tensor for name, tensor in peer.state_dict().items() if ".decoder." not in name}
    ours.load_state_dict({**state, "cls.predictions.weight": state["bert.embeddings.word_embeddings.weight"]})
    batch, padded = make_batches(lengths)

    def step(model: Any) -> tuple[float, float]:
        start = time.process_time()
        model.zero_grad()
        value = peer(**padded).loss if model is peer else loss(ours.train(), batch)["loss"]
        value.backward()
        return time.process_time() - start, value.item()

    first, *rest = [[step(model) for model in (peer, ours)] for _ in range(7)]
    assert first[0][1] == pytest.approx(first[1][1], rel=1e-5 if not dropout else 0.1)
    theirs, own = (median(pair[which][0] for pair in rest) for which in (0, 1))
    print(f"transformers {theirs:.2f} s, ours {own:.2f} s: {theirs / own:.2f}")
    assert theirs / own > bound
