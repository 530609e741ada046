"""The LLM app from its command line: on one process, on ranks, stopped, resumed, with adapters, and with bad input."""

import json
import re
import shlex
import sys
import sysconfig
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from apps.llm import picture
from apps.llm.data import Texts, open_rows, read_metadata
from apps.llm.routers import RouterWatch
from apps.llm.settings import Config
from data_prep import text
from hpcai import config, dist, log
from hpcai.models import llm
from hpcai.models.llm import LLM, LLMConfig, Tokenizer
from hpcai.models.llm.config import ExpertsConfig
from hpcai.models.llm.load import save_folder
from hpcai.nn.moe import Router
from hpcai.train.optim import match_names
from tests.apps.app_contract import AppContract
from tests.apps.app_runs import ROOT, damage, metric_by_step
from tests.apps.small_apps import LLM as APP


def damage_data(data: Path, kind: str) -> None:
    def change(file: h5py.File) -> None:
        file["tokens"][1, 3] = 300

    damage(data, kind, {"token": change})
    metadata = json.loads((data / "text.json").read_text())
    changes: dict[str, Any] = {"vocabulary": 5000, "sequence": 31, "type": "float32"}
    if kind in changes:
        (data / "text.json").write_text(json.dumps(metadata | {kind: changes[kind]}))
    if kind in ("no text.json", "no tokenizer.json"):
        (data / kind.removeprefix("no ")).unlink()
    if kind == "tokenizer":
        Tokenizer.train(["a text of another kind"] * 9, 257 + 9).save(data)


class TestContract(AppContract):
    damage_data = staticmethod(damage_data)


def test_bits_per_byte_are_those_of_the_text(data: Path) -> None:
    """Each token of the validation rows, also the first of a document, is predicted from the tokens before it in its document."""
    run, rows = APP.cached_run(data), open_rows(Config(), "validation", dist.single_process(), data)
    model, tokenizer = LLM.load(run / "model.safetensors").double(), Tokenizer.load(data)
    tokens = np.stack([rows.read(index)["tokens"] for index in range(len(rows))]).astype(int)
    decoded = tokenizer.decode(np.append(tokens[:, :-1].ravel(), tokens[-1, -1]).tolist(), skip_special=True)
    nats = 0.0
    for row in tokens.tolist():
        begins = [0, *(position for position in range(1, 33) if row[position] == tokenizer.eos)]
        for begin, end in zip(begins, [*begins[1:], 32]):
            if end > begin:  # tokens after ``begin``, up to the one that ends the document
                nats -= llm.likelihoods(model, row[begin : begin + 1], [row[begin + 1 : end + 1]])[0]
    actual = metric_by_step(run, "evaluate", "bits_per_byte")[6]
    num_bytes = len(decoded.encode()) - len(tokenizer.decode(tokens[0, :1].tolist()).encode())
    assert actual == pytest.approx(nats / np.log(2) / num_bytes, rel=1e-5)
    scores = np.load(run / "text.npz")
    assert scores["names"][-1] == "this model" and scores["counts"].sum() == 2 * 32
    assert metric_by_step(run, "evaluate", "loss")[6] == pytest.approx(nats / (tokens.size - len(tokens)), rel=1e-5)


def test_only_adapters_are_trained_and_saved(data: Path, tmp_path: Path) -> None:
    start, overrides = APP.cached_run(data), ("lora={rank: 2, targets: [q_proj, down_proj]}", "step.lr=1e-2")
    sizes = ("vocabulary", "width", "layers", "heads", "inner", "positions")
    run, sharded = tmp_path / "run", tmp_path / "sharded"
    assert APP.run(data, run, f"start.weights={start}", *overrides) == 0
    assert sorted(path.name for path in (run / "adapter").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert not (run / "model.safetensors").exists()
    model = LLM.load(start)
    assert all(getattr(model.cfg, name) == getattr(LLM.load(start / "model.safetensors").cfg, name) for name in sizes)
    llm.load_adapter(model, run / "adapter")
    validation = Texts(open_rows(Config(), "validation", dist.single_process(), data), read_metadata(data), "apart", "all")
    rows = [validation.sample(index, 0) for index in range(len(validation))]
    batch = llm.Batch(*(torch.from_numpy(np.stack([row[k] for row in rows])) for k in range(4)))
    with torch.no_grad():
        total, count = llm.score(model, batch)["loss"]
    assert float(total) / float(count) == pytest.approx(metric_by_step(run, "evaluate")[6], rel=1e-5)
    assert metric_by_step(run, "evaluate")[6] < 0.999 * metric_by_step(start, "evaluate")[6], "adapters learn"
    APP.on_ranks(2, data, sharded, f"start.weights={start}", *overrides, "mesh.tensor=2")
    assert metric_by_step(sharded) == pytest.approx(metric_by_step(run), rel=2e-5)
    assert APP.run(data, run, f"start.weights={start}", *overrides, "train.epochs=3") == 0, "the run resumes"
    assert len(metric_by_step(run)) == 9


GPT = ["model.rotary=null", "model.norm=layer", "model.feed=gelu", "model.bias=true"]


def test_training_starts_from_a_folder_of_gpt2(data: Path, tmp_path: Path) -> None:
    """In Hugging Face's format on one rank, and from the folder of a run on two: the loss curves are equal."""
    first = APP.cached_run(data, *GPT)
    model = LLM.load(first)
    save_folder(model.state_dict(), model.cfg, tmp_path / "folder")
    starts = {"single": (1, tmp_path / "folder"), "sharded": (2, first, "mesh.tensor=2")}
    for name, (ranks, start, *overrides) in starts.items():
        APP.on_ranks(ranks, data, tmp_path / name, f"start.weights={start}", *GPT, *overrides)
        assert metric_by_step(tmp_path / name) == pytest.approx(metric_by_step(tmp_path / "single"), rel=2e-5)
    assert metric_by_step(tmp_path / "single")[1] < 0.99 * metric_by_step(first)[1]


def test_a_model_that_cannot_fit_is_refused_before_it_is_built(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("apps.llm.data.build_model", lambda *_: pytest.fail("a model was built"))
    monkeypatch.setattr("apps.llm.data.build_loaders", lambda *_: pytest.fail("data were read"))
    overrides, start = ["model.width=65536", "model.layers=512", "model.heads=512", "model.inner=262144"], time.process_time()
    APP.check_refused(data, tmp_path / "run", overrides, "a rank needs", capsys)
    assert time.process_time() - start < 10 and not (tmp_path / "run").exists()


def test_weights_of_projections_decay_and_those_of_adapters_if_they_are_trained() -> None:
    cfg, model = Config().step, LLM(LLMConfig(vocabulary=9, width=8, layers=1, heads=2, inner=8, positions=4))
    assert match_names(model, cfg) == {name for name, _ in model.named_parameters() if name.endswith("_proj.weight")}
    assert len(match_names(llm.adapt(model, llm.LoRAConfig(rank=2)), cfg)) == 2 * len(llm.LoRAConfig().targets)


def test_weights_of_other_sizes_and_tokenizers_are_refused(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = APP.cached_run(data)
    APP.check_refused(data, tmp_path / "run", [f"start.weights={start}", "model.layers=3"], "model.layers is 3, in", capsys)
    other = tmp_path / "other"
    other.mkdir()
    for name in ("config.json", "model.safetensors"):
        (other / name).write_bytes((start / name).read_bytes())
    Tokenizer.train(["a text of another kind"] * 9, 257 + 9).save(other)
    APP.check_refused(data, tmp_path / "run", [f"start.weights={other}"], "its weights were trained with other tokens", capsys)


def test_a_blend_reads_its_folders_by_weight(data: Path, tmp_path: Path) -> None:
    other, counts = tmp_path / "other", [0, 0]
    APP.make_data(other)
    from apps.llm.data import build_loaders

    args = [str(APP.small_config), *APP.quick_settings, f"data.directory={data}", f"data.blend={{{other}: 0.5}}"]
    cfg = config.load(Config, args[0], args[1:])
    with build_loaders(cfg, dist.single_process()) as (training, _, _):
        assert len(training) == 4 and training.batch_size == 8, "24 rows, and half as many"
        for epoch in range(2):
            order = training.sampler.order(epoch)
            counts = [count + int(part.sum()) for count, part in zip(counts, (order < 24, order >= 24))]
    assert counts == [48, 24]
    assert APP.run(data, tmp_path / "run", f"data.blend={{{other}: 0.5}}") == 0 and len(metric_by_step(tmp_path / "run")) == 8


def test_a_run_with_experts_reports_their_load(data: Path, tmp_path: Path) -> None:
    experts = "model.experts={count: 4, top_k: 2, inner: 16, capacity: 1.0, dense_layers: [0]}"
    assert APP.run(data, tmp_path, experts, "model.layers=3", "train.epochs=1", "train.report_every=1") == 0
    for name, (low, high) in {"expert_load": (1, 2), "router_entropy": (0.1, np.log(4)), "dropped": (0.001, 0.5)}.items():
        values = [*metric_by_step(tmp_path, name=name).values()]
        assert values and all(low <= value <= high for value in values), (name, values)
    texts = picture.read(tmp_path / picture.FILE)
    assert texts.load is not None and texts.load.shape == (2, 4)
    assert texts.load.sum(-1) == pytest.approx(2 * texts.counts.sum()), "two experts a token"


def test_a_collapsed_router_is_named_with_a_remedy() -> None:
    model = llm.LLM(LLMConfig(vocabulary=16, width=8, layers=2, heads=2, inner=8, experts=ExpertsConfig(count=8, inner=8)))
    assert model.cfg.experts is not None
    for router in (part for part in model.modules() if isinstance(part, Router)):
        nn.init.zeros_(router.weight)
    metrics = llm.loss(model, llm.Batch(torch.randint(16, (2, 9))))
    values = {name: float(metrics[name]) for name in ("expert_load", "router_entropy")}
    events: list[Any] = []
    reports = SimpleNamespace(emit=lambda kind, **fields: events.append((kind, fields["step"], fields["text"])))
    watch: Any = RouterWatch(reports, model.cfg.experts)  # type: ignore[arg-type]
    for step in range(1, 9):
        load = 3.5 if step == 3 else values["expert_load"]
        watch.write(log.Event("train", 0.0, {**values, "step": step, "expert_load": load}))
    (kind, step, text), = events  # fmt: skip
    assert (kind, step) == ("note", 6), "the third in a row"
    assert text.startswith("routers have collapsed: the busiest expert has 4 times a balanced load, of at most 4, at an entropy")
    assert text.endswith("raise model.experts.balance_loss (0; often 0.01), or lower step.lr")


def test_only_answers_are_trained_on_and_scored(tmp_path: Path) -> None:
    """In packed rows, the loss of an answer depends on its question and on no other pair."""
    lines = [{"q": f"{number}+{number}?", "a": f" {2 * number}."} for number in range(60)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data, run = tmp_path / "data", tmp_path / "run"
    args = ["--tokenizer", "bytes", "--sequence", "32", "--held-out", "0.3", "--prompt", "q", "--answer", "a", "--workers", "1"]
    assert text.main(["convert", str(tmp_path / "sums.jsonl"), str(data), *args]) == 0
    overrides = ("data.learn=answers", "data.judge=answers", "data.batch=1", "step.lr=1e-2", "train.epochs=1")
    assert APP.run(data, run, *overrides, "data.evaluation_batch=2") == 0
    readers = [open_rows(Config(), split, dist.single_process(), data) for split in ("train", "validation")]
    samples = [[rows.read(n) for n in range(len(rows))] for rows in readers]
    answers = [[[n for begin, end in row["spans"] for n in range(max(begin, 1), end)] for row in rows] for rows in samples]
    assert sum(metric_by_step(run, name="tokens").values()) == sum(map(len, answers[0])) < 0.6 * 32 * len(samples[0])
    model, nats, eos = LLM.load(run).double(), 0.0, Tokenizer.load(data).eos
    for row, positions in zip(samples[1], answers[1]):
        tokens = row["tokens"].tolist()
        for n in positions:
            begin = max([0, *(k for k in range(n) if tokens[k] == eos)])
            nats -= llm.likelihoods(model, tokens[begin:n], [[tokens[n]]])[0]
    assert metric_by_step(run, "evaluate")[len(samples[0])] == pytest.approx(nats / sum(map(len, answers[1])), rel=1e-5)


def test_rows_without_validation_are_trained_on(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("a text of one's own\n" * 40)
    args = ["--tokenizer", "bytes", "--sequence", "32", "--held-out", "0", "--workers", "1"]
    assert text.main(["convert", str(tmp_path / "my.txt"), str(tmp_path / "data"), *args]) == 0
    assert APP.run(tmp_path / "data", tmp_path / "run", "train.epochs=1") == 0
    assert len(metric_by_step(tmp_path / "run")) == 3 and not metric_by_step(tmp_path / "run", "evaluate")
    assert str(LLM.load(tmp_path / "run").generate("a te", most=3))


def test_three_commands_go_from_a_folder_of_text_to_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the commands of the page on a library of a few files with a smaller model, then its notebook cell."""
    page = (ROOT / "apps/llm/README.md").read_text()
    first_block = re.findall(r"```sh\n(.*?)```", page, re.S)[0]
    prepare, fit, generate = (shlex.split(line, comments=True) for line in first_block.splitlines())
    (tmp_path / "lib").mkdir()
    for number in range(40):
        (tmp_path / f"lib/part{number}.py").write_text(f"def main(value):\n    return value + {number}\n" * 20)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    monkeypatch.chdir(tmp_path)
    assert text.main([*prepare[3:], "--sequence", "32", "--tokenizer", "train:300", "--held-out", "0.2", "--workers", "1"]) == 0
    tiny = ["model.width=16", "model.layers=1", "model.heads=2", "model.inner=24", "train.steps=4"]
    with pytest.raises(SystemExit) as error:
        config.run(Config, import_module("apps.llm.__main__").main, [str(ROOT / fit[3]), *fit[4:], *tiny])
    assert error.value.code == 0
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["apps.llm", *generate[3:]])
    assert generate[3] == "generate"
    import_module("apps.llm.generate").run([*generate[4:], "most=12"])
    assert len(capsys.readouterr().out.strip()) > 5
    cell, engine_cell = re.findall(r"```python\n(.*?)```", page, re.S)
    names: dict[str, Any] = {}
    exec(cell.replace("most=100", "most=9"), names)
    assert str(names["model"].generate("def main(", temperature=0.8, top_p=0.95, most=9)) in capsys.readouterr().out
    exec(engine_cell.replace("most=100", "most=9"), names)
    assert len(capsys.readouterr().out.split()) > 1 and names["engine"].unfinished == 0


def test_joined_documents_have_no_document_numbers(data: Path) -> None:
    rows, metadata = open_rows(Config(), "validation", dist.single_process(), data), read_metadata(data)
    joined, apart = (Texts(rows, metadata, mode, "all").sample(3, 0) for mode in ("joined", "apart"))
    assert joined.documents is None and apart.documents is not None
    np.testing.assert_array_equal(joined.tokens, apart.tokens)
    eos = Tokenizer.load(data).eos
    np.testing.assert_array_equal(apart.documents, np.cumsum(apart.tokens == eos))
    assert joined.loss_mask.all() and apart.loss_mask.all()
