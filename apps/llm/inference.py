"""Plan the generation of texts:  hpcai plan llm --inference apps/llm/configs/llama31-405b.yaml step.matmul=fp8 --gpus 8

Each mesh of tensor and pipeline parallelism and each number of texts that are continued at the same time has a latency, the time
between two tokens of a text, and a throughput. Those that no other one surpasses in both are the frontier. The time of a step is
that of its memory traffic (weights, keys and values) or of its matrix products, if they take longer, with all-reduces, and launches
of captured kernels; prefill and decode take turns. Pipeline stages compute different texts at the same time. Weights have 8 bits
with step.matmul=fp8, otherwise 16, as keys and values.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from apps.llm.settings import Config
from hpcai import config
from hpcai.cli import tables
from hpcai.cli.report.theme import DPI, STYLE, WIDTH
from hpcai.errors import ConfigError
from hpcai.models.llm import LLMConfig
from hpcai.plan.machines import Machine, find_machine

_KERNELS = 10  # of a layer in a captured step
_USABLE = 0.9  # fraction of the memory of a GPU for weights and cache


@dataclass(frozen=True)
class Serving:
    """A model replica on ``tensor`` x ``pipeline`` GPUs that continues ``texts`` texts at the same time."""

    tensor: int
    pipeline: int
    texts: int
    latency: float
    """seconds between two tokens of a text"""
    first: float
    """seconds to the first token of a text, if it does not wait"""
    throughput: float
    """generated tokens per second and GPU"""
    memory: float
    """bytes of weights and cache of a GPU"""


class Planner:
    """Plans texts of ``lengths``: tokens of a prompt, and generated ones."""

    def __init__(self, cfg: Config, machine: Machine, lengths: Sequence[int]) -> None:
        self.model, self.machine, (self.prompt, self.new) = cfg.model, machine, lengths
        self.element = 1 if cfg.step.matmul == "fp8" and 1 in machine.flops else 2
        if self.prompt + self.new > self.model.positions:
            actual = f"texts of {self.prompt} + {self.new} tokens (--lengths), model.positions is {self.model.positions}"
            raise ConfigError(f"{actual}; give fewer tokens, or more positions")

    def meshes(self, gpus: int) -> Iterator[tuple[int, int]]:
        """Yield the sizes of tensor and pipeline parallelism of replicas on ``gpus`` GPUs or fewer."""
        model, sizes = self.model, [n for n in range(1, gpus + 1) if gpus % n == 0]
        for tensor, pipeline in product(sizes, repeat=2):
            has_heads = model.heads % tensor == 0 and (model.kv_heads % tensor == 0 or tensor % model.kv_heads == 0)
            if gpus % (tensor * pipeline) == 0 and has_heads and tensor <= self.machine.gpus_per_node and pipeline <= model.layers:
                yield tensor, pipeline

    def plan(self, tensor: int, pipeline: int) -> Iterator[Serving]:
        """Yield replicas with 1, 2, 4, ... texts, up to those that fit the memory of their GPUs."""
        model, texts = self.model, 1
        kept = self._cache_bytes(tensor, pipeline) * (self.prompt + self.new)
        weights = model.num_parameters * self.element / (tensor * pipeline)
        prefill = self.stage_seconds(tensor, pipeline, self.prompt, 1, self.prompt / 2)
        while (memory := weights + texts * kept) <= _USABLE * self.machine.capacity:
            own = max(texts // pipeline, 1)  # in a step of a stage
            decode = self.stage_seconds(tensor, pipeline, own, own, self.prompt + self.new / 2)
            latency, first = pipeline * decode, pipeline * prefill
            if texts >= pipeline:  # stages never wait: the prompts of other texts lie between the tokens of one
                latency = texts * (prefill / self.new + decode / own)
            total = latency * self.new + (first if texts < pipeline else 0)
            yield Serving(tensor, pipeline, texts, latency, first, texts * self.new / total / (tensor * pipeline), memory)
            texts *= 2

    def stage_seconds(self, tensor: int, pipeline: int, tokens: int, texts: int, context: float) -> float:
        """Return the seconds of a step of a pipeline stage, for ``tokens`` of ``texts`` with ``context`` tokens before them."""
        model, machine, share = self.model, self.machine, tensor * pipeline
        active, experts = model.num_active_parameters, model.experts
        idle = 1.0 if experts is None else (1 - experts.top_k / experts.count) ** tokens  # fraction of experts without a token
        read = (active + (model.num_parameters - active) * (1 - idle)) * self.element / share
        read += texts * context * self._cache_bytes(tensor, pipeline)
        products = tokens * (2 * active + 4 * model.layers * model.heads * model.head_dim * context) / share
        seconds = machine.slowdown * max(read / machine.bandwidth, products / machine.flops[self.element])
        seconds += model.layers / pipeline * _KERNELS * machine.kernel_overhead
        hidden = 2 * tokens * model.width
        if tensor > 1:
            seconds += 2 * model.layers / pipeline * machine.communication_time("all-reduce", hidden, range(tensor))[0]
        return seconds + (machine.communication_time("send", hidden, (0, tensor))[0] if pipeline > 1 else 0.0)

    def _cache_bytes(self, tensor: int, pipeline: int) -> float:
        """Return the bytes of keys and values of a token on a GPU."""
        model = self.model
        return 2 * 2 * model.layers * model.kv_heads * model.head_dim / (pipeline * min(tensor, model.kv_heads))


def frontier(servings: Sequence[Serving]) -> list[Serving]:
    """Return those that no other one surpasses in latency and throughput, by latency."""
    kept = list[Serving]()
    for each in sorted(servings, key=lambda each: (each.latency, -each.throughput)):
        if not kept or each.throughput > kept[-1].throughput:
            kept.append(each)
    return kept


def compare(planner: Planner, gpus: int, what: str, degree: int | None = None) -> float:
    """Return how much better one form of parallelism is than the other on ``gpus`` GPUs: ``latency`` of tensor over pipeline
    parallelism, ``throughput`` of pipeline over tensor parallelism, with the best number of texts and ``degree``, if it is None."""
    meshes = [mesh for mesh in planner.meshes(gpus) if degree in (None, max(mesh))]
    plans = [each for mesh in meshes for each in planner.plan(*mesh)]
    tensor, pipeline = [each for each in plans if each.pipeline == 1], [each for each in plans if each.tensor == 1]
    if what == "latency":
        return min(each.latency for each in pipeline) / min(each.latency for each in tensor)
    return max(each.throughput for each in pipeline) / max(each.throughput for each in tensor)


def main(args: Any) -> None:
    """Print the frontier for ``args`` of the command line, or published ratios and those planned."""
    machine = replace(find_machine(args.machine), slowdown=args.slower or 1.0)
    if args.check:
        rows = check()
        print(json.dumps(rows)) if args.json else print(*_check_lines(rows), sep="\n")
        return
    files = [each for each in args.overrides if each.endswith((".yaml", ".yml"))][:1]
    cfg = config.load(Config, files[0] if files else None, [each for each in args.overrides if each not in files])
    planner = Planner(cfg, machine, args.lengths)
    plans = {gpus: frontier([each for mesh in planner.meshes(gpus) for each in planner.plan(*mesh)]) for gpus in args.gpus}
    if args.picture is not None:
        draw(plans).savefig(args.picture, dpi=DPI)
    if args.json:
        print(json.dumps({gpus: [asdict(each) for each in each_plan] for gpus, each_plan in plans.items()}))
        return
    print(f"{cfg.model.num_parameters / 1e9:,.0f} billion parameters in {8 * planner.element} bits on {machine.name}: "
          f"texts of {planner.prompt} + {planner.new} tokens")  # fmt: skip
    lines = [
        (gpus, each.tensor, each.pipeline, gpus // (each.tensor * each.pipeline), each.texts, f"{each.memory / 1e9:.0f}",
         f"{1e3 * each.first:.0f}", f"{1e3 * each.latency:.1f}", f"{1 / each.latency:.1f}", f"{each.throughput:.1f}")
        for gpus, each_plan in plans.items() for each in each_plan
    ]  # fmt: skip
    heads = "GPUs", "tensor", "pipeline", "replicas", "texts", "GB", "first, ms", "next, ms", "tokens/s a text", "tokens/s a GPU"
    print(*tables.lines(lines, heads), sep="\n")
    print("texts of a replica; milliseconds to the first token of a text and between two, both at their best")
    for gpus in [gpus for gpus, each_plan in plans.items() if not each_plan]:
        print(f"{gpus:,} GPUs: the weights and one text do not fit their memory")


def check() -> list[dict[str, Any]]:
    """Return published ratios (see ``compare``) with those planned, with kernels at the rates of the machine."""
    rows = []
    for entry in tomllib.loads(Path(__file__).with_name("published.toml").read_text())["inference"]:
        cfg = config.load(Config, None, ["step.matmul=fp8"])
        cfg = cfg.model_copy(update={"model": LLMConfig.preset(entry["model"])})
        planner = Planner(cfg, find_machine(entry["machine"]), entry["lengths"])
        planned = compare(planner, entry["gpus"], entry["what"], entry.get("degree"))
        rows.append({name: entry[name] for name in ("model", "machine", "gpus", "what", "published")} | {"planned": planned})
    return rows


def _check_lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    lines = [(row["model"], f"{row['gpus']} {row['machine']}", row["what"], f"{row['published']:.1f}", f"{row['planned']:.2f}",
              f"{100 * (row['planned'] / row['published'] - 1):+.0f} %") for row in rows]  # fmt: skip
    yield from tables.lines(lines, ("model", "GPUs", "ratio", "published", "planned", "error"), left=("model", "GPUs", "ratio"))
    yield "latency of pipeline over that of tensor parallelism, for one text; throughput likewise, for as many texts as fit"


def draw(plans: Mapping[int, Sequence[Serving]]) -> Figure:
    """Draw the frontier of each number of GPUs: tokens per second of a text and of a GPU."""
    with matplotlib.rc_context(STYLE):
        figure = Figure((WIDTH, 0.7 * WIDTH), layout="constrained")
        axes = figure.subplots()
        for gpus, each_plan in plans.items():
            axes.plot([1 / each.latency for each in each_plan], [each.throughput for each in each_plan], "o-", label=f"{gpus} GPUs")
            for each in each_plan[:: max(len(each_plan) // 4, 1)]:
                name = f"{each.tensor} x {each.pipeline}, {each.texts}"
                axes.annotate(name, (1 / each.latency, each.throughput), (4, 4), textcoords="offset points", fontsize="x-small")
        axes.set(xscale="log", yscale="log", xlabel="tokens/s of a text", ylabel="tokens/s of a GPU",
                 title="tensor x pipeline parallelism, texts")  # fmt: skip
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")
        axes.margins(0.12)
        axes.legend()
    return figure
