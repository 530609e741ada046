"""``python -m apps.llm generate``, ``chat`` and ``score``: prompts of all sources, resumption, chats, questions, rows, sharding."""

import io
import json
import math
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from apps.llm import chat, generate, score
from apps.llm.chat import ChatConfig
from apps.llm.generate import GenerateConfig, continue_file
from apps.llm.prompting import load_model
from apps.llm.score import ScoreConfig
from apps.llm.settings import AxesConfig
from data_prep import text
from hpcai.dist.mesh import Mesh
from hpcai.errors import DataError, MeshError
from hpcai.models import llm
from hpcai.models.llm import LLM, EngineConfig, LLMConfig, LoRAConfig, Tokenizer, adapt, save_adapter
from hpcai.models.llm.text import start_tokens
from tests.ranks.launch import on_ranks
from tests.reference_data import load_json

SIZES: dict[str, Any] = {"vocabulary": 260, "width": 16, "layers": 2, "heads": 2, "inner": 24, "positions": 64}
OVERRIDES = {"most": 12, "temperature": 1.3, "top_k": 40, "precision": "fp32"}
PROMPTS = [{"text": "one"}, {"text": "and two", "extra": 5}, {"text": ""}, {"text": "four: [x]"}, {"text": "the fifth"}]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a model and a tokenizer."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(2)
    model = LLM(LLMConfig(**SIZES))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.7)
    model.save(folder / "model.safetensors")
    Tokenizer.byte_level().save(folder)
    return folder


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command with some arguments and return its stdout and stderr. Assert that it exits with ``code``, if given."""

    def run(function: Any, *args: str, code: int | None = None, stdin: str = "") -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["python"])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        if code is None:
            function(args)
        else:
            with pytest.raises(SystemExit) as exited:
                function(args)
            assert exited.value.code == code
        stdout, stderr = capsys.readouterr()
        return stdout, stderr

    return run


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def command_args(**overrides: Any) -> list[str]:
    return [f"{name}={value}" for name, value in (OVERRIDES | overrides).items()]


# ---- generate


@pytest.mark.parametrize("prompt", ["[1, 2", '"quoted"', "a = b"])
def test_a_prompt_is_literal_text(prompt: str, home: Path, command: Any) -> None:
    expected = str(LLM.load(home).generate(prompt, temperature=1.3, top_k=40, most=12, seed=3))
    args = command_args(weights=home, seed=3)
    assert command(generate.run, *args, f"prompt={prompt}")[0] == f"{expected}\n"
    assert command(generate.run, *args, stdin=prompt)[0] == f"{expected}\n"


def test_a_file_of_prompts_is_completed_by_line_and_resumed(home: Path, tmp_path: Path, command: Any) -> None:
    path, out, model = write_jsonl(tmp_path / "p.jsonl", PROMPTS), tmp_path / "deep" / "out.jsonl", LLM.load(home)
    args = command_args(weights=home, file=path) + ["engine.max_num_seqs=2"]
    expected = [
        {"line": n, **prompt, "completion": str(model.generate(prompt["text"], temperature=1.3, top_k=40, most=12, seed=n))}
        for n, prompt in enumerate(PROMPTS, 1)
    ]
    assert "5 of 5 texts" in command(generate.run, *args, f"out={out}")[1]
    complete = out.read_text()
    assert sorted(map(json.loads, complete.splitlines()), key=lambda row: row["line"]) == expected
    assert command(generate.run, *args)[0] == complete
    cut = complete[: -len(complete.splitlines()[-1]) // 2]  # in the middle of a line
    left = 5 - cut.count("\n")
    out.write_text(cut)
    assert f"{left} of 5 texts" in command(generate.run, *args, f"out={out}")[1]
    resumed = out.read_text()
    assert sorted(resumed.splitlines()) == sorted(complete.splitlines()) and resumed.startswith(cut[: cut.rindex("\n")])
    assert "0 of 5 texts" in command(generate.run, *args, f"out={out}")[1] and out.read_text() == resumed
    write_jsonl(path, [*PROMPTS[:2], {"text": "another"}])
    assert "out.jsonl: line 3: belongs to no prompt of" in command(generate.run, *args, f"out={out}", code=1)[1]


@pytest.mark.parametrize(("row", "reason"), load_json("refused/prompts"))
def test_an_invalid_prompt_is_refused_with_its_line_number(row: str, reason: str, home: Path, tmp_path: Path, command: Any) -> None:
    (tmp_path / "p.jsonl").write_text(f'{{"text": "a"}}\n{row}\n')
    stdout, stderr = command(generate.run, *command_args(weights=home, file=tmp_path / "p.jsonl"), code=1)
    assert f"p.jsonl: {reason}" in stderr and not stdout


def test_contradictory_settings_are_refused(command: Any) -> None:
    for args, message in ((["prompt=a", "file=b"], "prompt and file are both given"), (["out=a"], "out is given, but file is not"),
                          (['stop=[""]'], "stop has an empty string"), (["prompt="], "prompt is empty")):  # fmt: skip
        assert message in command(generate.run, *args, code=2)[1]
    assert "neither data nor tasks" in command(score.run, code=2)[1]


def test_replicas_with_prompts_of_their_own_share_no_experts(tmp_path: Path) -> None:
    mesh = Mesh({"replicate": 2, "expert": 2}, world=2)
    with pytest.raises(MeshError, match="mesh.expert is 2, but a model with prompts .* set mesh.expert=1"):
        load_model(GenerateConfig(weights=tmp_path, prompt="a"), mesh)


def complete_file(mesh: Mesh, cfg: GenerateConfig) -> str:
    continue_file(cfg, mesh)
    return cfg.out.read_text() if cfg.out is not None and mesh.is_first else ""


def test_sharded_generation_equals_unsharded(home: Path, tmp_path: Path) -> None:
    """Also with an adapter, which is added to the weights."""
    axes = {"replicate": 2, "tensor": 2}
    cfg, model = LoRAConfig(rank=2, alpha=8.0), LLM.load(home)
    adapt(model, cfg)
    nn.init.normal_(model.model.layers[1].self_attn.v_proj.adapter.lora_B.weight, std=0.5)  # type: ignore[union-attr]
    save_adapter(model, cfg, tmp_path / "adapter")
    path = write_jsonl(tmp_path / "p.jsonl", PROMPTS)
    settings: dict[str, Any] = {"most": 10, "temperature": 1.3, "file": path, "precision": "fp32"}
    settings["engine"] = EngineConfig(max_num_seqs=2)
    for number, adapter in enumerate((None, tmp_path / "adapter")):
        unsharded = GenerateConfig(**settings, weights=home, adapter=adapter, out=tmp_path / f"unsharded{number}")
        sharded = unsharded.model_copy(update={"out": tmp_path / f"sharded{number}", "mesh": AxesConfig(**axes)})
        texts = on_ranks(axes, complete_file, sharded)[0], complete_file(Mesh({}), unsharded)
        lines = [sorted(text.splitlines()) for text in texts]
        assert lines[0] == lines[1] and len(lines[0]) == len(PROMPTS)
    completions = {row["line"]: row["completion"] for row in map(json.loads, (tmp_path / "unsharded1").read_text().splitlines())}
    assert completions[1] == str(model.eval().generate(PROMPTS[0]["text"], most=10, temperature=1.3, seed=1))  # type: ignore[arg-type]
    assert (tmp_path / "unsharded0").read_text() != (tmp_path / "unsharded1").read_text()


def test_a_folder_of_adapters_in_place_of_a_model_is_told_apart(home: Path, tmp_path: Path, command: Any) -> None:
    cfg, run = LoRAConfig(rank=2), tmp_path / "run"
    save_adapter(adapt(LLM.load(home), cfg), cfg, run / "adapter", str(home))
    for weights in (run, run / "adapter"):
        stderr = command(generate.run, *command_args(weights=weights), "prompt=a", code=2)[1]
        assert f"{weights}: holds adapters of a model: give weights={home} adapter={run / 'adapter'}" in stderr


# ---- chat


@pytest.fixture(scope="module")
def talker(home: Path) -> Path:
    """A folder with the model and a chat template."""
    folder = shutil.copytree(home, home.with_name("talker"))
    tokenizer = Tokenizer.byte_level()
    tokenizer.config["chat_template"] = (
        "{% for m in messages %}{{ raise_exception('begins with an answer') if m.role == 'assistant' and loop.index0 == 1 }}"
        "{{ m.role[0] + m.content + '\n' }}{% endfor %}"
    )
    tokenizer.save(folder)
    return folder


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def talk(mesh: Mesh, cfg: ChatConfig, lines: str) -> str:
    with redirect_stdout(io.StringIO()) as stdout, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO(lines))
        chat.chat(cfg, mesh)
    return stdout.getvalue()


def test_lines_are_answered_in_one_conversation_until_reset(talker: Path, command: Any) -> None:
    """Answers are those of ``LLM.chat`` with the messages so far; sharded, too; the oldest are left out of a full context."""
    model, lines, answers = LLM.load(talker), ["one", "", "[2: x]", "third one", "/reset", "four", "x" * 70, "five"], []
    history: list[dict[str, str]] = []
    for line in lines:
        history = [] if line == "/reset" else history
        if line not in ("", "/reset", "x" * 70):
            history = history[2 * (line == "third one") :] + [say("user", line)]
            kwargs: dict[str, Any] = {"temperature": 1.3, "top_k": 40, "most": 12, "seed": len(history) + 1}
            answers.append(str(model.chat([say("system", "a: b"), *history], **kwargs)))
            history.append(say("assistant", answers[-1]))
    args = command_args(weights=talker, system="a: b")
    stdout, stderr = command(chat.run, *args, stdin="\n".join(lines))
    assert stdout == "".join(f"{answer}\n" for answer in answers) and stderr.count("context of 64 tokens is full") == 2
    cfg = ChatConfig(**OVERRIDES, weights=talker, system="a: b", mesh=AxesConfig(tensor=2))
    assert on_ranks({"tensor": 2}, talk, cfg, "\n".join(lines)) == [stdout, ""]


def test_an_interrupt_ends_an_answer_and_a_second_one_the_chat(
    talker: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def reply(model: Any, messages: list[Any], **kwargs: Any) -> Iterator[str]:
        seen.append([*messages])
        for piece in "abc":
            for _ in range(len(seen)):
                signal.raise_signal(signal.SIGINT)
            yield piece

    monkeypatch.setattr("hpcai.models.llm.text.chat_reply", reply)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        stdout, _ = command(chat.run, *command_args(weights=talker, system="s"), stdin="one\ntwo\nthree\n", code=130)
    finally:
        signal.signal(signal.SIGINT, before)
    assert stdout == "a\n" and seen[1][1:] == [say("user", "one"), say("assistant", "a"), say("user", "two")]


def test_a_chat_needs_a_template(home: Path, command: Any) -> None:
    assert "has no chat template: the model knows no messages; continue" in command(chat.run, f"weights={home}", code=1)[1]


# ---- score


def test_questions_are_scored_by_likelihood(home: Path, tmp_path: Path, command: Any) -> None:
    model, questions, correct, rng = LLM.load(home).double(), [], [0, 0], np.random.default_rng(0)
    for number in range(12):
        choices = [bytes(rng.integers(97, 123, n).tolist()).decode() for n in (1, 3, 9)]
        choices[1] = "é".join(choices[1])
        context, answer = ("The sky is " if number else "", int(rng.integers(3)))
        log_p = [llm.likelihoods(model, [256, *context.rstrip().encode()], [(context[10:] + each).encode()])[0] for each in choices]
        correct[0] += int(np.argmax(log_p)) == answer
        correct[1] += int(np.argmax(np.array(log_p) / [1, 7, 9])) == answer
        questions.append({"context": context, "choices": choices, "answer": answer})
    path = write_jsonl(tmp_path / "q.jsonl", questions)
    assert correct[0] != correct[1]
    printed = command(score.run, f"weights={home}", f"tasks={path}", "precision=fp32", "batch=5")[0].splitlines()
    assert printed == [f"accuracy       {correct[0] / 12:.6g}", f"accuracy_norm  {correct[1] / 12:.6g}", "questions      12"]


def test_a_choice_is_tokenized_with_its_context(home: Path) -> None:
    model = LLM.load(home)
    model.tokenizer = tokenizer = Tokenizer.train(["the sky is blue " * 20], 259 + 1)
    task = score.Task(1, "the sky is ", ["blue"], 0)
    first, second = score.encode_choice(model, task, "blue", None)
    tokens = tokenizer.encode("the sky is blue")
    assert [*first, *second] == [*start_tokens(tokenizer), *tokens] and tokenizer.decode(second) == " blue"
    long = score.Task(1, "x" * 100, ["y" * 10], 0)
    first, second = score.encode_choice(model, long, "y" * 10, None)
    assert len(first) + len(second) == 65 and set(first) == {tokenizer.encode("x")[0]}
    with pytest.raises(DataError, match="line 1: a choice of 70 tokens, the model has 64 positions"):
        score.encode_choice(model, long, "y" * 70, None)


@pytest.mark.parametrize("row", load_json("refused/questions"))
def test_an_invalid_question_is_refused_with_its_line_number(row: str, home: Path, tmp_path: Path, command: Any) -> None:
    (tmp_path / "q.jsonl").write_text(f'{{"context": "a", "choices": ["b", "c"], "answer": 0}}\n\n{row}\n')
    assert "q.jsonl: line 3: " in command(score.run, f"weights={home}", f"tasks={tmp_path / 'q.jsonl'}", code=1)[1]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of documents with prompts and answers."""
    folder = tmp_path_factory.mktemp("rows")
    samples = [{"q": f"what is {n} and {n % 3}?", "a": f" it is {n + n % 3}, é"} for n in range(40)]
    write_jsonl(folder / "qa.jsonl", samples)
    args = ["--tokenizer", "bytes", "--sequence", "32", "--held-out", "0.5", "--prompt", "q", "--answer", "a", "--workers", "1"]
    assert text.main(["convert", str(folder / "qa.jsonl"), str(folder / "out"), *args]) == 0
    return folder / "out"


def reference_sums(home: Path, rows: Path, count: int, judge: str) -> tuple[float, float, int]:
    """Return nats, bytes and number of scored tokens. Each document is evaluated separately, from the end token before it."""
    model, nats, byte_count, token_count, remaining = LLM.load(home).double(), 0.0, 0, 0, count
    for path in sorted((rows / "validation").glob("*.h5")):
        with h5py.File(path) as file:
            ends, spans = np.split(file["ends"][:], np.cumsum(file["documents"][:])[:-1]), file["answers"][:].cumsum()
            for row, tokens in enumerate(file["tokens"][:remaining].astype(np.int64)):
                remaining -= 1
                mask = np.full(len(tokens), judge == "all")
                for first, last in file["spans"][spans[row] - file["answers"][row] : spans[row]]:
                    mask[first:last] = True
                boundaries = [0, *(ends[row] - 1), len(tokens) - 1]
                for a, b in zip(boundaries, boundaries[1:]):
                    if b > a:
                        with torch.no_grad():
                            entropy = model(torch.tensor(tokens[None, a:b]), torch.tensor(tokens[None, a + 1 : b + 1]))[0].numpy()
                        scored = mask[a + 1 : b + 1]
                        nats, token_count = nats + entropy[scored].sum(), token_count + int(scored.sum())
                        byte_count += int(Tokenizer.byte_level().byte_lengths[tokens[a + 1 : b + 1]][scored].sum())
    assert remaining == 0
    return nats, byte_count, token_count


@pytest.mark.parametrize("judge", ["all", "answers"])
def test_rows_are_scored_by_token_and_by_byte(judge: Any, home: Path, rows: Path) -> None:
    scores = score.score(ScoreConfig(weights=home, data=rows, judge=judge, batch=3, rows=10, precision="fp32"), Mesh({}))
    nats, byte_count, tokens = reference_sums(home, rows, 10, judge)
    assert scores["tokens"] == tokens and scores["rows"] == 10 and scores["loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert scores["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    if judge == "answers":  # these rows have byte counts of answers only
        assert scores["bits_per_byte"] == pytest.approx(nats / byte_count / math.log(2), rel=1e-5)
    joined = score.score(ScoreConfig(weights=home, data=rows, judge=judge, rows=10, documents="joined"), Mesh({}))
    assert joined["tokens"] == tokens and joined["loss"] != scores["loss"]


def compute_scores(mesh: Mesh, cfg: ScoreConfig) -> dict[str, float]:
    return score.score(cfg, mesh)


def test_sharded_scores_equal_unsharded(home: Path, rows: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    questions = [{"context": "ab", "choices": [chr(c) * n for c, n in zip(rng.integers(97, 123, 3), (1, 2, 5))], "answer": n % 3}
                 for n in range(7)]  # fmt: skip
    path = write_jsonl(tmp_path / "q.jsonl", questions)
    cfg = ScoreConfig(weights=home, data=rows, tasks=path, judge="answers", batch=4, precision="fp32")
    expected = score.score(cfg, Mesh({}))
    for scores in on_ranks({"replicate": 2, "context": 2}, compute_scores, cfg):
        assert scores == pytest.approx(expected, rel=1e-5)
