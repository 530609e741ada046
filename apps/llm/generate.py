"""Generate texts:  python -m apps.llm generate weights=FOLDER prompt="Once upon a time" [temperature=0.8 mesh.tensor=2 ...]

``prompt=`` is a literal text. Without it and ``file=`` the prompt is read from standard input. Its continuation is streamed. A
file has many prompts: one on each line, or in .jsonl an object {"text": "..."} or {"messages": [{"role": "...",
"content": "..."}, ...]} on each line. Results are appended to ``out=`` as JSON lines; prompts that have one there are skipped.
Prompts are distributed over model replicas (``mesh.replicate``).
"""

import json
import sys
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import model_validator

from apps.llm.prompting import TextConfig, load_model, run_command
from hpcai.errors import DataError
from hpcai.json_file import read_json_lines, read_text
from hpcai.models.llm import EngineConfig

_ROUND = 8  # texts of a replica after which results are written
EXPECTED = 'a line such as {"text": "Once upon"} or {"messages": [{"role": "user", "content": "Hello"}]}'


class GenerateConfig(TextConfig):
    """Prompts and sampling of text generation."""

    prompt: str | None = None
    """one prompt"""
    file: Path | None = None
    """file with a prompt on each line; of .jsonl an object with a text, or with the messages of a chat"""
    out: Path | None = None
    """file of JSON lines for the results of `file`; null: standard output"""
    engine: EngineConfig = EngineConfig()
    """sizes of the engine that continues the prompts of `file`"""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.prompt is not None and self.file is not None:
            raise ValueError("prompt and file are both given; give one of them")
        if self.out is not None and self.file is None:
            raise ValueError("out is given, but file is not: one text goes to standard output; give file, or leave out")
        if self.prompt == "":
            raise ValueError("prompt is empty, as of a shell variable that is not set; give a text, or for one from its very begin "
                             "an empty standard input in place of prompt (< /dev/null)")  # fmt: skip
        return self


class Prompt(NamedTuple):
    line: int
    content: dict[str, Any]


def main(cfg: GenerateConfig) -> None:
    from hpcai import dist

    with dist.start(cfg.mesh) as mesh:
        if cfg.file is None:
            stream_prompt(cfg, mesh)
        else:
            continue_file(cfg, mesh)


_ADVICE = "with a file of prompts, the same command continues those that are left"
run = partial(run_command, GenerateConfig, main, text="prompt", advice=_ADVICE)


def stream_prompt(cfg: GenerateConfig, mesh: Any) -> None:
    """Stream the continuation of one prompt to standard output, by the first replica only."""
    from hpcai.dist.collectives import broadcast_object
    from hpcai.models.llm.text import continue_text

    text = cfg.prompt if cfg.prompt is not None else broadcast_object(sys.stdin.read() if mesh.is_first else "", mesh.peers)
    if mesh["replicate"].rank == 0:
        model, pipeline = load_model(cfg, mesh)
        for piece in continue_text(model, text, seed=cfg.seed, pipeline=pipeline, capture=cfg.capture, **cfg.sampling):
            if mesh.is_first:
                print(piece, end="", flush=True)
        if mesh.is_first:
            print(flush=True)


def continue_file(cfg: GenerateConfig, mesh: Any) -> None:
    """Write the continuation of each prompt of a file that has no line in ``out`` yet, in the order in which they end. Before any
    is generated, raises DataError for a line that is no prompt or is too long for the model, and if ``out`` belongs to others."""
    from hpcai.dist.collectives import all_gather_object, broadcast_object
    from hpcai.models.llm.generation import check_prompts
    from hpcai.models.llm.text import Completions, prompt_tokens

    assert cfg.file is not None
    prompts = broadcast_object(read_prompts(cfg.file) if mesh.is_first else [], mesh.peers)
    done = broadcast_object(read_completed(cfg.out, cfg.file, prompts) if mesh.is_first else set(), mesh.peers)
    model, pipeline = load_model(cfg, mesh)

    def tokens(prompt: Prompt) -> list[int]:
        if "messages" in prompt.content:
            return list(model.tokenizer.chat(prompt.content["messages"], True)[0])
        return prompt_tokens(model, prompt.content["text"])

    encoded: list[tuple[Prompt, list[int]]] = []
    for prompt in prompts:
        try:
            encoded.append((prompt, tokens(prompt)))
        except DataError as problem:
            raise DataError(f"{cfg.file}: line {prompt.line}: {problem}") from problem
    check_prompts([ids for _, ids in encoded], model.cfg.vocabulary, model.cfg.positions,
                  lambda n: f"{cfg.file}: line {encoded[n][0].line}")  # fmt: skip
    todo = [each for each in encoded if each[0].line not in done]
    if mesh.is_first:
        sys.stderr.write(f"{len(todo)} of {len(prompts)} texts to continue\n")
    completions, replicas = Completions(model, cfg.engine, pipeline=pipeline, capture=cfg.capture), mesh["replicate"]
    local = dict(enumerate(todo[replicas.rank :: replicas.size]))
    for n, (prompt, ids) in local.items():
        completions.add(n, ids, seed=cfg.seed + prompt.line, fresh="messages" in prompt.content, **cfg.sampling)
    ended, count = iter(completions), len(todo)
    while count:
        records = [{"line": local[n][0].line, **local[n][0].content, "completion": text} for n, text in islice(ended, _ROUND)]
        gathered = all_gather_object(records if mesh.model_parallel.rank == 0 else [], mesh.peers)
        lines = [f"{json.dumps(line, ensure_ascii=False)}\n" for each in gathered for line in each]
        count -= len(lines)
        if mesh.is_first and cfg.out is None:
            print("".join(lines), end="", flush=True)
        elif mesh.is_first and cfg.out is not None:
            with cfg.out.open("a", encoding="utf-8", newline="") as file:
                file.write("".join(lines))


def read_prompts(path: Path) -> list[Prompt]:
    """Read the prompts of a file. Raises DataError with the number of a line that is no prompt."""
    if path.suffix != ".jsonl":
        prompts = [Prompt(number, {"text": line}) for number, line in enumerate(read_text(path).splitlines(), 1) if line.strip()]
    else:
        prompts = []
        for number, content in read_json_lines(path, EXPECTED):
            if isinstance(content.get("text"), str) == isinstance(content.get("messages"), list):
                raise DataError(f"{path}: line {number}: has {', '.join(content) or 'nothing'}, expected {EXPECTED}")
            prompts.append(Prompt(number, content))
    if not prompts:
        raise DataError(f"{path}: has no prompt, expected one on each line")
    return prompts


def read_completed(out: Path | None, path: Path, prompts: Sequence[Prompt]) -> set[int]:
    """Return the lines of ``path`` that have a result in ``out``, after truncating an incomplete last line of an interrupted run.
    Raises DataError if ``out`` belongs to other prompts."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
    if out is None or not out.exists():
        return set()
    with out.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)
    contents, done = {prompt.line: prompt.content for prompt in prompts}, set[int]()
    for number, line in read_json_lines(out, "a line that this command writes; choose another out"):
        content = {name: value for name, value in line.items() if name not in ("line", "completion")}
        if contents.get(line.get("line", 0)) != content:
            raise DataError(f"{out}: line {number}: belongs to no prompt of {path}; choose another out")
        done.add(line["line"])
    return done
