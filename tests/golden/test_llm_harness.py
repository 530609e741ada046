"""The lm-evaluation-harness: results of its own class for transformers; sharded models and replicas give those of one process."""

import json
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from apps.llm import evaluate
from hpcai.dist.mesh import Mesh
from hpcai.models.llm import LLM, LLMConfig, Tokenizer, parallelize
from hpcai.models.llm.load import save_folder
from tests.ranks.launch import on_ranks

_WHY = "lm_eval is not installed (pip install -e '.[lm-eval]'): language models are NOT compared with its class for transformers"
evaluator: Any = pytest.importorskip("lm_eval.evaluator", reason=_WHY)
tasks: Any = pytest.importorskip("lm_eval.tasks", reason=_WHY)
HarnessLM: Any = import_module("hpcai.models.llm.harness").HarnessLM
WORDS = ["the", "sky", "is", "blue", "and", "green", ",", "a", "cat", "sat", "on", "mats", "rain", "fell", "over", "hills\n"]
BEGIN, *ROLES = "<|begin|>", "<|user|>", "<|assistant|>"
TEMPLATE = ("{{ bos_token }}{% for m in messages %}<|{{ m.role }}|> {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")  # fmt: skip
QUESTION = {"doc_to_text": "{{question}}", "doc_to_target": "{{choices[1]}}"}
TASKS: dict[str, dict[str, Any]] = {
    "choices": {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": 1, "metrics": ["acc_norm"]},
    "likelihood": {"output_type": "loglikelihood", "metrics": ["perplexity", "acc"]},
    "rolling": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
                "metrics": ["bits_per_byte"]},
    "texts": {"output_type": "generate_until", "doc_to_text": "the {{question|replace('<|begin|>', '')}}",
              "metrics": ["exact_match"], "generation_kwargs": {"until": [" and", "<|user|>"], "max_gen_toks": 12}},
}  # fmt: skip


@pytest.fixture(scope="module", params=[True, False], ids=["begin", "no begin"])
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tasks and a Llama of random weights, whose tokenizer adds a beginning-of-text token or has none."""
    folder, rng = tmp_path_factory.mktemp("llama"), np.random.default_rng(0)
    words = lambda count: " ".join(rng.choice(WORDS, count))  # noqa: E731
    tokenizer = Tokenizer.train([words(4000)], 320, [BEGIN, *ROLES])
    content, config = json.loads(tokenizer._text), {**tokenizer.config, "chat_template": TEMPLATE}
    if request.param:
        single = [{"SpecialToken": {"id": BEGIN, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        config["bos_token"] = BEGIN
        content["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": [*single, *single[1:]],
                                     "special_tokens": {BEGIN: {"id": BEGIN, "ids": [1], "tokens": [BEGIN]}}}  # fmt: skip
    Tokenizer(json.dumps(content), config).save(folder)
    torch.manual_seed(0)
    model = LLM(LLMConfig(vocabulary=tokenizer.size, width=32, layers=2, heads=4, key_heads=2, inner=48, positions=48))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    save_folder(model.state_dict(), model.cfg, folder)
    contexts = ["", "the sky is ", f"{BEGIN}the cat", *(words(n) + " " * (n % 2) for n in (1, 3, 9, 30, 90, 90))]
    docs = [{"question": context, "text": words(3 + 20 * n), "choices": [f" {words(k)}" for k in (1, 1, 2, 5)]}
            for n, context in enumerate(contexts)]  # fmt: skip
    (folder / "docs.json").write_text("\n".join(map(json.dumps, docs)))
    data = {"data_files": {"test": str(folder / "docs.json")}, "cache_dir": str(folder / "cache")}
    for name, task in TASKS.items():
        metrics = [{"metric": metric} for metric in task["metrics"]]
        task = {"task": f"own_{name}", "dataset_path": "json", "dataset_kwargs": data, "test_split": "test", "target_delimiter": "",
                **QUESTION, **task, "metric_list": metrics}  # fmt: skip
        (folder / f"{name}.yaml").write_text(json.dumps({key: value for key, value in task.items() if key != "metrics"}))
    return folder


def results_of(model: Any, home: Path, **kwargs: Any) -> Any:
    manager = tasks.TaskManager(include_path=str(home), include_defaults=False)
    results = evaluator.simple_evaluate(
        model=model, tasks=[f"own_{name}" for name in TASKS], task_manager=manager, **{"bootstrap_iters": 1000, **kwargs}
    )
    return json.loads(json.dumps(results, default=str))


def compare(actual: Any, expected: Any) -> None:
    """Assert equality of all metrics, and of the requests and answers of each document."""

    def flat(results: Any) -> Any:
        answers = sorted((task, each["doc_id"], each["arguments"], each["filtered_resps"])
                         for task, some in results["samples"].items() for each in some)  # fmt: skip
        return tree_flatten([answers, results["results"]])

    (ours, shape), (theirs, expected_shape) = flat(actual), flat(expected)
    assert shape == expected_shape
    assert ours == [pytest.approx(value, rel=1e-4, abs=1e-5) if isinstance(value, float) else value for value in theirs]


@pytest.mark.parametrize("chat", [False, True])
def test_results_are_those_of_the_class_for_transformers(
    chat: bool, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hugging_face: Any = pytest.importorskip("lm_eval.models.huggingface", reason=_WHY)
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    monkeypatch.setattr(sys, "argv", ["python"])
    expected = results_of(hugging_face.HFLM(str(home), device="cpu", dtype="float32", batch_size=4), home, apply_chat_template=chat)
    monkeypatch.setattr(tasks, "TaskManager", partial(tasks.TaskManager, include_defaults=False))
    out = tmp_path / "out.json"
    evaluate.run([f"weights={home}", "tasks=own_*", f"include_path={home}", f"out={out}", f"apply_chat_template={chat}", "batch=3"])
    compare(json.loads(out.read_text()), expected)
    with pytest.raises(SystemExit):
        evaluate.run([f"weights={home}", "tasks=[own_texts, own_text]", f"include_path={home}"])
    assert "tasks: the harness has no own_text; " in capsys.readouterr().err


def evaluate_on(mesh: Mesh, home: Path) -> Any:
    model = parallelize(LLM.load(home), mesh)
    return results_of(HarnessLM(model, mesh, batch=3), home, bootstrap_iters=0)


def test_replicas_of_sharded_models_give_the_results_of_one_process(home: Path) -> None:
    first, *_ = on_ranks({"replicate": 2, "tensor": 2}, evaluate_on, home)
    compare(first, evaluate_on(Mesh({}), home))
