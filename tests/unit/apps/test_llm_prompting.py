"""``python -m apps.llm generate`` and ``score``: prompts from everywhere, what a stop leaves, questions, rows, any cut."""

import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from apps.llm import generate, score
from apps.llm.generate import GenerateConfig, continue_file
from apps.llm.score import ScoreConfig
from apps.llm.settings import AxesConfig
from data_prep import text
from hpcai.dist.mesh import Mesh
from hpcai.errors import DataError
from hpcai.models import llm
from hpcai.models.llm import LLM, LLMConfig, LoRAConfig, Tokenizer, adapt, save_adapter
from hpcai.models.llm.text import start_tokens
from tests.ranks.launch import on_ranks

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES: dict[str, Any] = {"vocabulary": 260, "width": 16, "layers": 2, "heads": 2, "inner": 24, "positions": 64}
WORDS = {"most": 12, "temperature": 1.3, "top_k": 40, "precision": "fp32"}
PROMPTS = [{"text": "one"}, {"text": "and two", "more": 5}, {"text": ""}, {"text": "four: [x]"}, {"text": "the fifth"}]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run leaves."""
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
    """What a command says on its two outputs; with ``code`` it ends with that."""

    def run(function: Any, *words: str, code: int | None = None, entered: str = "") -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["python"])
        monkeypatch.setattr(sys, "stdin", io.StringIO(entered))
        if code is None:
            function(words)
        else:
            with pytest.raises(SystemExit) as ended:
                function(words)
            assert ended.value.code == code
        out, err = capsys.readouterr()
        return out, err

    return run


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def words_of(**more: Any) -> list[str]:
    return [f"{name}={value}" for name, value in (WORDS | more).items()]


# ---- generate


@pytest.mark.parametrize("prompt", ["[1, 2", '"quoted"', "a = b"])
def test_a_prompt_is_text_as_it_stands(prompt: str, home: Path, command: Any) -> None:
    right = str(LLM.load(home).generate(prompt, temperature=1.3, top_k=40, most=12, seed=3))
    words = words_of(weights=home, seed=3)
    assert command(generate.run, *words, f"prompt={prompt}")[0] == f"{right}\n"
    assert command(generate.run, *words, entered=prompt)[0] == f"{right}\n"


def test_a_file_of_prompts_becomes_lines_and_is_gone_on_with(home: Path, tmp_path: Path, command: Any) -> None:
    path, out, model = lines(tmp_path / "p.jsonl", PROMPTS), tmp_path / "deep" / "out.jsonl", LLM.load(home)
    words = words_of(weights=home, file=path, batch=2)
    right = [
        {"line": n, **given, "completion": str(model.generate(given["text"], temperature=1.3, top_k=40, most=12, seed=n))}
        for n, given in enumerate(PROMPTS, 1)
    ]
    assert "5 of 5 texts" in command(generate.run, *words, f"out={out}")[1]
    whole = out.read_text()
    assert [json.loads(line) for line in whole.splitlines()] == right
    assert command(generate.run, *words)[0] == whole
    out.write_text(whole[: whole.index("four")])  # in the middle of a line
    assert "2 of 5 texts" in command(generate.run, *words, f"out={out}")[1] and out.read_text() == whole
    assert "0 of 5 texts" in command(generate.run, *words, f"out={out}")[1] and out.read_text() == whole
    lines(path, [*PROMPTS[:2], {"text": "another"}])
    assert "out.jsonl: line 3: belongs to no prompt of" in command(generate.run, *words, f"out={out}", code=1)[1]


@pytest.mark.parametrize(("row", "text"), [
    ('{"text": "a", "messages": []}', "line 2: has text, messages"), (json.dumps({"text": "a" * 70}), "line 2 has 71 tokens"),
])  # fmt: skip
def test_a_line_that_is_no_prompt_is_refused_by_number(row: str, text: str, home: Path, tmp_path: Path, command: Any) -> None:
    (tmp_path / "p.jsonl").write_text(f'{{"text": "a"}}\n{row}\n')
    out, err = command(generate.run, *words_of(weights=home, file=tmp_path / "p.jsonl"), code=1)
    assert f"p.jsonl: {text}" in err and not out


def test_settings_that_do_not_go_together_are_refused_before_torch(command: Any) -> None:
    for words, told in ((["prompt=a", "file=b"], "prompt and file are both given"), (["out=a"], "out is given, but file is not"),
                        (['stop=[""]'], "stop has an empty string")):  # fmt: skip
        assert told in command(generate.run, *words, code=2)[1]
    assert "neither data nor tasks" in command(score.run, code=2)[1]
    code = "import sys, apps.llm.generate, apps.llm.score; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def made(mesh: Mesh, cfg: GenerateConfig) -> str:
    continue_file(cfg, mesh)
    return cfg.out.read_text() if cfg.out is not None and mesh.is_first else ""


@pytest.mark.parametrize("axes", [{"replicate": 2}, {"pipeline": 2, "tensor": 2}], ids=str)
def test_any_cut_makes_the_same_of_a_file(axes: dict[str, int], home: Path, tmp_path: Path) -> None:
    """Also with an adapter, which is added to the weights."""
    cfg, model = LoRAConfig(rank=2, alpha=8.0), LLM.load(home)
    adapt(model, cfg)
    nn.init.normal_(model.model.layers[1].self_attn.v_proj.adapter.lora_B.weight, std=0.5)  # type: ignore[union-attr]
    save_adapter(model, cfg, tmp_path / "adapter")
    path = lines(tmp_path / "p.jsonl", PROMPTS)
    words: dict[str, Any] = {"most": 10, "temperature": 1.3, "file": path, "batch": 2, "precision": "fp32"}
    for number, adapter in enumerate((None, tmp_path / "adapter")):
        one = GenerateConfig(**words, weights=home, adapter=adapter, out=tmp_path / f"one{number}")
        many = one.model_copy(update={"out": tmp_path / f"many{number}", "mesh": AxesConfig(**axes)})
        assert on_ranks(axes, made, many)[0] == made(Mesh({}), one)
    told = json.loads((tmp_path / "one1").read_text().splitlines()[0])["completion"]
    assert told == str(model.eval().generate(PROMPTS[0]["text"], most=10, temperature=1.3, seed=1))  # type: ignore[arg-type]
    assert (tmp_path / "one0").read_text() != (tmp_path / "one1").read_text()


# ---- score


def test_questions_are_scored_as_their_likelihoods_say(home: Path, tmp_path: Path, command: Any) -> None:
    model, questions, right, rng = LLM.load(home).double(), [], [0, 0], np.random.default_rng(0)
    for number in range(12):
        letters = [bytes(rng.integers(97, 123, n).tolist()).decode() for n in (1, 3, 9)]
        letters[1] = "é".join(letters[1])
        context, answer = ("The sky is " if number else "", int(rng.integers(3)))
        found = [llm.likelihoods(model, [256, *context.rstrip().encode()], [(context[10:] + each).encode()])[0] for each in letters]
        right[0] += int(np.argmax(found)) == answer
        right[1] += int(np.argmax(np.array(found) / [1, 7, 9])) == answer
        questions.append({"context": context, "choices": letters, "answer": answer})
    path = lines(tmp_path / "q.jsonl", questions)
    assert right[0] != right[1]
    told = command(score.run, f"weights={home}", f"tasks={path}", "precision=fp32", "batch=5")[0].splitlines()
    assert told == [f"accuracy       {right[0] / 12:.6g}", f"accuracy_norm  {right[1] / 12:.6g}", "questions      12"]


def test_a_choice_is_what_it_adds_to_the_tokens_of_its_context(home: Path) -> None:
    model = LLM.load(home)
    model.tokenizer = made_of_words = Tokenizer.train(["the sky is blue " * 20], 259 + 1)
    task = score.Task(1, "the sky is ", ["blue"], 0)
    first, second = score.encode_choice(model, task, "blue", None)
    whole = made_of_words.encode("the sky is blue")
    assert [*first, *second] == [*start_tokens(made_of_words), *whole] and made_of_words.decode(second) == " blue"
    long = score.Task(1, "x" * 100, ["y" * 10], 0)
    first, second = score.encode_choice(model, long, "y" * 10, None)
    assert len(first) + len(second) == 65 and set(first) == {made_of_words.encode("x")[0]}
    with pytest.raises(DataError, match="line 1: a choice of 70 tokens, the model has 64 positions"):
        score.encode_choice(model, long, "y" * 70, None)


@pytest.mark.parametrize("row", [
    "{", '{"context": "a", "choices": ["b", "c"]}', '{"context": "a", "choices": ["b", "c"], "answer": 2}',
    '{"context": "a", "choices": ["b", ""], "answer": 0}',
])  # fmt: skip
def test_a_line_that_is_no_question_is_refused_by_number(row: str, home: Path, tmp_path: Path, command: Any) -> None:
    (tmp_path / "q.jsonl").write_text(f'{{"context": "a", "choices": ["b", "c"], "answer": 0}}\n\n{row}\n')
    assert "q.jsonl: line 3: " in command(score.run, f"weights={home}", f"tasks={tmp_path / 'q.jsonl'}", code=1)[1]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of documents, some of which are answers."""
    folder = tmp_path_factory.mktemp("rows")
    found = [{"q": f"what is {n} and {n % 3}?", "a": f" it is {n + n % 3}, é"} for n in range(40)]
    lines(folder / "qa.jsonl", found)
    words = ["--tokenizer", "bytes", "--sequence", "32", "--held-out", "0.5", "--prompt", "q", "--answer", "a", "--workers", "1"]
    assert text.main(["convert", str(folder / "qa.jsonl"), str(folder / "out"), *words]) == 0
    return folder / "out"


def by_hand(home: Path, rows: Path, count: int, judge: str) -> tuple[float, float, int]:
    """Nats, bytes and tokens that count, each document read by itself behind the end of the one before."""
    model, nats, widths, counts, left = LLM.load(home).double(), 0.0, 0, 0, count
    for path in sorted((rows / "validation").glob("*.h5")):
        with h5py.File(path) as file:
            ends, spans = np.split(file["ends"][:], np.cumsum(file["documents"][:])[:-1]), file["answers"][:].cumsum()
            for row, tokens in enumerate(file["tokens"][:left].astype(np.int64)):
                left -= 1
                mask = np.full(len(tokens), judge == "all")
                for first, last in file["spans"][spans[row] - file["answers"][row] : spans[row]]:
                    mask[first:last] = True
                cuts = [0, *(ends[row] - 1), len(tokens) - 1]
                for a, b in zip(cuts, cuts[1:]):
                    if b > a:
                        with torch.no_grad():
                            entropy = model(torch.tensor(tokens[None, a:b]), torch.tensor(tokens[None, a + 1 : b + 1]))[0].numpy()
                        kept = mask[a + 1 : b + 1]
                        nats, counts = nats + entropy[kept].sum(), counts + int(kept.sum())
                        widths += int(Tokenizer.byte_level().byte_lengths[tokens[a + 1 : b + 1]][kept].sum())
    assert left == 0
    return nats, widths, counts


@pytest.mark.parametrize("judge", ["all", "answers"])
def test_rows_are_scored_by_token_and_by_byte(judge: Any, home: Path, rows: Path) -> None:
    found = score.score(ScoreConfig(weights=home, data=rows, judge=judge, batch=3, rows=10, precision="fp32"), Mesh({}))
    nats, widths, tokens = by_hand(home, rows, 10, judge)
    assert found["tokens"] == tokens and found["rows"] == 10 and found["loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    if judge == "answers":  # the only bytes that these rows tell
        assert found["bits_per_byte"] == pytest.approx(nats / widths / math.log(2), rel=1e-5)
    joined = score.score(ScoreConfig(weights=home, data=rows, judge=judge, rows=10, documents="joined"), Mesh({}))
    assert joined["tokens"] == tokens and joined["loss"] != found["loss"]


def scored(mesh: Mesh, cfg: ScoreConfig) -> dict[str, float]:
    return score.score(cfg, mesh)


@pytest.mark.parametrize("axes", [{"replicate": 2, "tensor": 2}, {"context": 2}], ids=str)
def test_any_cut_finds_the_same(axes: dict[str, int], home: Path, rows: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    questions = [{"context": "ab", "choices": [chr(c) * n for c, n in zip(rng.integers(97, 123, 3), (1, 2, 5))], "answer": n % 3}
                 for n in range(7)]  # fmt: skip
    path = lines(tmp_path / "q.jsonl", questions)
    cfg = ScoreConfig(weights=home, data=rows, tasks=path, judge="answers", batch=4, precision="fp32")
    right = score.score(cfg, Mesh({}))
    for found in on_ranks(axes, scored, cfg):
        assert found == pytest.approx(right, rel=1e-5)
