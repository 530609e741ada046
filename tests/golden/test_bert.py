"""BERT agrees with stored results of transformers and of MLPerf's rules (tests/data/bert)."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcai import dist, train
from hpcai.errors import CheckpointError, ConfigError, DataError
from hpcai.models.bert import Batch, Bert, BertClassifier, BertConfig, counted, load_weights, loss, save_folder, score
from hpcai.nn.lm_head import IGNORE_INDEX
from hpcai.settings import ScheduleConfig, StepConfig
from hpcai.train.schedule import make_lr_schedule
from tests.reference_data import DATA, load_arrays, load_json

FOLDER = DATA / "bert"
CASES = ["gelu", "tanh"]


def read(case: str, kind: str) -> tuple[Bert, Batch, dict[str, Any], dict[str, np.ndarray]]:
    """Return the model in float64, the batch ``plain`` or ``packed``, its expected values and its arrays."""
    prefix = "packed_" if kind == "packed" else ""
    arrays = {k.removeprefix(prefix): v for k, v in load_arrays(f"bert/{case}").items() if k.startswith("packed_") == bool(prefix)}
    names = ("input_ids", "labels", "next_sentence_label", "token_type_ids")
    wide = {name: torch.from_numpy(arrays[name].astype(np.int64)) for name in names}
    rows = len(wide["input_ids"])
    if prefix:
        lengths, nsp = torch.zeros(rows, 3, dtype=torch.int64), torch.full((rows, 3), IGNORE_INDEX)
        for (row, _, length), label in zip(arrays["sequences"].tolist(), wide["next_sentence_label"]):
            slot = int((lengths[row] > 0).sum())
            lengths[row, slot], nsp[row, slot] = length, label
    else:
        lengths = torch.from_numpy(arrays["attention_mask"].astype(np.int64)).sum(1, keepdim=True)
        nsp = wide["next_sentence_label"][:, None]
    labels = wide["labels"]
    masked = torch.argsort((labels == -100).int(), dim=1, stable=True)[:, : int((labels != -100).sum(1).max())]
    targets = labels.gather(1, masked)
    batch = Batch(wide["input_ids"], lengths, masked, targets.where(targets != -100, IGNORE_INDEX), wide["token_type_ids"], nsp)
    return load_weights(FOLDER / case).double(), batch, load_json("bert/cases")[case][kind], arrays


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_logits_losses_and_gradients(case: str, kind: str) -> None:
    model, batch, expected, arrays = read(case, kind)
    logits, nsp = model(batch.tokens, batch.lengths, batch.types)
    inside = torch.arange(batch.tokens.shape[1]) < batch.lengths.sum(1, keepdim=True)
    real = arrays["attention_mask"].flatten() > 0 if kind == "plain" else slice(None)
    pairs = (logits[inside][:, ::9], "prediction", real), (nsp[batch.lengths > 0], "seq_relationship", slice(None))
    for actual, name, rows in pairs:
        np.testing.assert_allclose(actual.detach().numpy(), arrays[f"{name}_logits_f64"][rows], rtol=0, atol=1e-10)
    values = loss(model, batch)
    values["loss"].backward()
    assert values["loss"].item() == pytest.approx(expected["loss"], abs=1e-12)
    for name in ("mlm", "nsp"):
        total, count = values[f"{name}_loss"]
        assert (total / count).item() == pytest.approx(expected[f"{name}_loss"], abs=1e-12)
    norms = {name: p.grad.norm().item() for name, p in model.named_parameters() if p.grad is not None}
    assert norms == pytest.approx(expected["grad_l2"], abs=1e-9)
    scores = score(model, batch)
    assert float((scores["mlm_loss"][0] / scores["mlm_loss"][1]).detach()) == pytest.approx(expected["mlm_loss"], abs=1e-12)
    assert scores["perplexity"][1](scores["perplexity"][0])["perplexity"] == pytest.approx(np.exp(expected["mlm_loss"]))
    if kind == "plain":
        assert scores["mlm_accuracy"] == (expected["mlm_correct"], expected["masked"])
        assert scores["nsp_accuracy"] == (expected["nsp_correct"], len(batch.tokens))


@pytest.mark.parametrize("recompute", ["selective", "layers"])
def test_attention_with_a_mask_and_recomputation_give_the_same_gradients(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, expected, _ = read("gelu", "packed")
    model = Bert(model.cfg.model_copy(update={"recompute": recompute, "dropout": 0.0, "attention_dropout": 0.0})).double()
    model.load_state_dict(read("gelu", "packed")[0].state_dict())
    if recompute == "layers":  # as on a GPU: with padding
        monkeypatch.setattr("hpcai.kernels.packed_attention.triton_support.on_cpu", lambda x: False)
    loss(model.train(), batch)["loss"].backward()
    norms = {name: p.grad.norm().item() for name, p in model.named_parameters() if p.grad is not None}
    assert norms == pytest.approx(expected["grad_l2"], abs=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_lamb_makes_the_steps_of_mlperf(case: str) -> None:
    model, batch, _, _ = read(case, "plain")
    rule = load_json("bert/cases")[case]["lamb"]
    cfg = StepConfig(
        optimizer="lamb", lr=rule["lr"], betas=(rule["beta1"], rule["beta2"]), eps=rule["eps"], weight_decay=rule["weight_decay"],
        clip=rule["max_grad_norm"], decay_names=("*[!m].weight",), precision="fp64",
    )  # fmt: skip
    step = train.Step(model, loss, cfg, dist.single_process(), counts=counted)
    losses = [float(step(batch)["loss"]) for _ in range(4)]
    assert losses[:3] == pytest.approx(rule["losses"][:3], rel=1e-6) and losses[3] == pytest.approx(rule["losses"][3], rel=1e-5)


@pytest.mark.parametrize("kind", ["tf", "nvidia"])
def test_learning_rates(kind: str) -> None:
    for case in load_json("bert/rules")["lr_schedule"]:
        base, warmup, start = case["base_lr"], case["warmup_steps"], case["start_warmup_step"]
        first: Any = int(kind == "nvidia" and start != 0)
        cfg = ScheduleConfig(
            unit="steps", warmup=warmup + start, start=-start * base / max(warmup, 1), decay="linear", length=case["total_steps"],
            from_zero=True, first_step=first,
        )  # fmt: skip
        rate = make_lr_schedule(cfg, base, 1, case["total_steps"])
        assert [rate(step) for step in case["steps"]] == pytest.approx(case[kind], rel=1e-6, abs=1e-15), case["name"]


def test_names_and_sizes_of_bert_large() -> None:
    expected = json.loads(gzip.decompress((FOLDER / "names_bert_large.json.gz").read_bytes()))
    with torch.device("meta"):
        model = Bert()
        padded = Bert(BertConfig(vocabulary=30528))
    assert {name: list(p.shape) for name, p in model.named_parameters()} == dict(expected["tensors"])
    totals = [sum(p.numel() for p in each.parameters()) for each in (model, padded)]
    assert totals == [expected["total"], expected["total_with_vocab_30528"]]


def test_files_of_tensorflow_and_a_padded_vocabulary() -> None:
    model = load_weights(FOLDER / "tanh")
    same = load_weights(FOLDER / "tf_checkpoint_tanh.npz", model.cfg)
    padded = load_weights(FOLDER / "tanh", model.cfg.model_copy(update={"vocabulary": 104}))
    for name, tensor in model.state_dict().items():
        assert torch.equal(same.state_dict()[name], tensor), name
        wide = padded.state_dict()[name]
        assert torch.equal(wide[: len(tensor)], tensor) and not wide[len(tensor) :].any()
    with pytest.raises(CheckpointError, match="layers 3, the settings 2"):
        load_weights(FOLDER / "tanh", model.cfg.model_copy(update={"layers": 2}))


def test_bad_input_is_refused(tmp_path: Path) -> None:
    model = load_weights(FOLDER / "gelu")
    with pytest.raises(DataError, match="49 tokens, the model 48 positions"):
        model(torch.zeros(1, 49, dtype=torch.int64))
    save_folder(model.state_dict(), model.cfg, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"position_embedding_type": "relative_key"}))
    with pytest.raises(ConfigError, match="position_embedding_type"):
        load_weights(tmp_path)


def test_accuracy_is_of_all_masked_tokens() -> None:
    case = load_json("bert/rules")["mlm_accuracy"]
    sums = [0, 0]
    for each in case["batches"]:
        size = len(each["labels"])
        logits = torch.nn.functional.one_hot(torch.tensor([each["predictions"]]), 10).double()
        targets = torch.tensor([each["labels"]])
        batch = Batch(targets, torch.tensor([[size]]), targets, targets)
        correct, count = score(lambda *_, logits=logits: (logits, None), batch)["mlm_accuracy"]
        sums = [sums[0] + int(correct), sums[1] + int(count)]
    assert sums[0] / sums[1] == pytest.approx(case["accuracy"])


def hub_model(kind: str, **kwargs: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: parity with it is not tested")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.BertConfig(vocab_size=40, **sizes, **kwargs)
    return getattr(transformers, kind)(config).eval()


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertForPreTraining"])
def test_transformers_reads_and_writes_the_same_model(kind: str, tmp_path: Path) -> None:
    theirs, tokens = hub_model(kind), torch.arange(30).view(2, 15)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_weights(tmp_path / "theirs")
    assert ours.cfg.nsp == (kind == "BertForPreTraining")
    save_folder(ours.state_dict(), ours.cfg, tmp_path / "ours")
    again = type(theirs).from_pretrained(tmp_path / "ours").eval()
    for model in (theirs, again):
        logits: Tensor = next(iter(model(tokens).values()))
        torch.testing.assert_close(ours(tokens)[0], logits, rtol=0, atol=2e-6)
    assert again.state_dict().keys() == theirs.state_dict().keys()


def test_classifiers_are_those_of_transformers() -> None:
    tokens, mask = torch.arange(30).view(2, 15), torch.ones(2, 15)
    mask[1, 9:] = 0
    lengths = mask.sum(1, keepdim=True).long()
    for kind, per_token in (("BertForSequenceClassification", False), ("BertForTokenClassification", True)):
        theirs = hub_model(kind, num_labels=3)
        cfg = BertConfig(vocabulary=40, width=16, layers=2, heads=2, inner=24)
        ours = BertClassifier(cfg, 3, per_token, pretrained=Bert(cfg)).eval()
        ours.load_state_dict(theirs.state_dict())
        expected = theirs(tokens, attention_mask=mask).logits
        actual = ours(tokens, lengths)
        actual, expected = (actual[mask > 0], expected[mask > 0]) if per_token else (actual[:, 0], expected)
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)
