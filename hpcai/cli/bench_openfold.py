"""``hpcai bench openfold [PART ...]``: a step of OpenFold against the same layers written plainly, and what is around it.

    steps      forward, loss, backward and Adam of one protein, full channel sizes, no templates, in turns: ours, and the same
               network with all logits, gates, outer products and distances at once; on a GPU its 48 blocks, captured too
    memory     the peak of one step of each, and of ours where blocks keep their inputs alone, in a process of its own
    build      seconds to construct the network of MLPerf HPC
    featurize  seconds from a chain of 100 to 700 residues, its alignment of 100 to 10,000 rows and four templates to what the
               network reads: a crop of 256 residues, 124 clusters, 1,024 extra rows, four passes; by rows of the alignment
    fold       a whole chain without gradients: seconds and the peak, in a process of its own

Times are CPU seconds of one thread (wall milliseconds of a step on a GPU), medians. Chains and alignments are synthetic. Rows are
clusters + extra rows.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcai.errors import ConfigError

PARTS = ("steps", "memory", "build", "featurize", "fold")
_KINDS = ("plain", "ours", "captured")
_ALL_BLOCKS = 48
_DEPTHS, _LENGTHS = (100, 464, 2154, 10_000), (100, 700)


class Case(NamedTuple):
    """A network and its input. With all 48 blocks come all four for extra rows, with fewer one."""

    blocks: int
    residues: int
    clusters: int
    extra: int
    recycles: int

    def row(self) -> dict[str, Any]:
        rows = f"{self.clusters} + {self.extra}"
        return {"blocks": self.blocks, "residues": self.residues, "rows": rows, "recycles": self.recycles}


_CPU = [Case(4, 64, 32, 64, 0), Case(4, 64, 32, 64, 1), Case(2, 128, 32, 64, 0)]
_GPU = [Case(_ALL_BLOCKS, 256, 128, 1024, 0)]  # MLPerf HPC's
_CASES = {"memory": [Case(4, 128, 32, 64, 0)], "fold": [Case(4, 256, 32, 64, 0), Case(4, 512, 32, 64, 0)]}
_TINY = [Case(1, 16, 4, 6, 0), Case(1, 16, 4, 6, 1)]


def main(argv: Sequence[str]) -> int:
    from hpcai.cli.bench import _machine, finish, parser_of_parts

    parser = parser_of_parts("openfold", __doc__, PARTS)
    parser.add_argument(
        "--case", type=int, nargs=5, action="append", metavar=("BLOCKS", "RESIDUES", "CLUSTERS", "EXTRA", "RECYCLES"),
        help="of steps, memory and fold, in place of those that are measured by default; may be repeated",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=3, help="measured steps of each network")
    parser.add_argument("--samples", type=int, default=100, help="of featurize")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # for a quick test
    parser.add_argument("--one", choices=_KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", action="store_true", help=argparse.SUPPRESS)
    words = parser.parse_args(argv)
    torch.set_num_threads(1)
    on_gpu, tiny = torch.cuda.is_available(), words.tiny
    given = [Case(*numbers) for numbers in words.case or ()] or (_TINY if tiny else [])
    if words.one:  # the process that memory or fold starts
        print(json.dumps(_once(words.parts[0], words.one, given[0], words.checkpoint, tiny)))
        return 0
    found: dict[str, Any] = {"bench": "openfold", **_machine()}
    if "steps" in words.parts:
        forms = [(precision, save) for precision in ("fp32", "bf16") for save in (False, True)] if on_gpu else [("fp32", False)]
        cases = given or (_GPU if on_gpu else _CPU)
        found["steps"] = [_steps(case, *form, words.repeats, tiny) for case in cases for form in forms]
    if "memory" in words.parts:
        found["memory"] = [_memory(case, tiny) for case in given or _CASES["memory"]]
    if "build" in words.parts:
        found["build"] = _build(words.repeats, tiny)
    if "featurize" in words.parts:
        found["featurize"] = _featurize(words.samples, tiny)
    if "fold" in words.parts:
        found["fold"] = [_fold(case, tiny) for case in given or _CASES["fold"]]
    return finish(found, PARTS, words.json)


@contextmanager
def plainly() -> Iterator[None]:
    """Inside, the network and its loss are the same function of the same weights, in torch's operations on whole tensors."""
    from hpcai.kernels import attention, gates, outer
    from hpcai.models.openfold import attention as attentions
    from hpcai.models.openfold import evoformer, layers, objective

    def channels_first(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, weight, bias).permute(0, 3, 1, 2)

    def whole(function: Callable[[slice], Tensor], count: int, *_: Any) -> Tensor:
        return function(slice(0, count))

    plain = [
        (attentions, "gated_attention", attention.plain), (attentions, "channels_first", channels_first),
        (evoformer, "gate", gates.plain), (evoformer, "channels_first", channels_first), (evoformer, "outer_product", outer.plain),
        (evoformer, "in_parts", whole), (layers, "in_parts", whole), (objective, "several", lambda *_: 1 << 60),
    ]  # fmt: skip
    ours = [(module, name, getattr(module, name)) for module, name, _ in plain]
    try:
        for module, name, function in plain:
            setattr(module, name, function)
        yield
    finally:
        for module, name, function in ours:
            setattr(module, name, function)


def network(case: Case, save: bool = False, tiny: bool = False) -> Any:
    from hpcai.models.openfold import OpenFold, OpenFoldConfig

    changes: dict[str, Any] = {"template": None, "blocks": case.blocks, "checkpoint": save}
    if not tiny and case.blocks < _ALL_BLOCKS:
        changes["extra"] = {"blocks": 1}
    torch.manual_seed(0)
    model = OpenFold(OpenFoldConfig.preset("tiny" if tiny else "initial", **changes))
    for parameter in model.parameters():
        if not parameter.any():  # the last of a branch is 0 at first, and so would be all gradients within
            torch.nn.init.normal_(parameter, std=0.01)
    return model


def chain(length: int, draw: Any) -> Any:
    """Residues along a random walk, their atoms anywhere about them."""
    from hpcai.models.openfold import residues
    from hpcai.models.openfold.structures import Chain

    aatype = draw.integers(0, 20, length)
    mask = residues.ATOM37_EXISTS[aatype].astype("float32")
    positions = draw.normal(0, 2.2, (length, 1, 3)).cumsum(0) + draw.normal(0, 1.5, (length, 37, 3))
    sequence = "".join(residues.LETTERS[kind] for kind in aatype)
    return Chain("synthetic", sequence, aatype, (positions * mask[..., None]).astype("float32"), mask, mask, 2.0, None, "none")


def alignment(of: Any, rows: int, draw: Any) -> Any:
    """Relatives that share 30 to 90 % of the residues; 2 % of the places have deletions."""
    import numpy as np

    from hpcai.models.openfold.alignments import Alignment

    shape = rows, len(of.aatype)
    changed = draw.random(shape, np.float32) < draw.uniform(0.1, 0.7, (rows, 1))
    msa = np.where(changed, draw.integers(0, 22, shape, np.int8), of.aatype.astype(np.int8))
    deletions = draw.integers(1, 20, shape, np.int32) * (draw.random(shape, np.float32) < 0.02)
    msa[0], deletions[0] = of.aatype, 0
    return Alignment(msa, deletions, [f"row {number}" for number in range(rows)])


def batch(case: Case, training: bool = True) -> dict[str, Tensor]:
    """One protein, as ``OpenFold`` reads it."""
    import numpy as np

    from hpcai.models.openfold.features import FeatureConfig, collate, featurize

    draw = np.random.default_rng(0)
    made = chain(case.residues, draw)
    rows = alignment(made, case.clusters + case.extra, draw)
    cfg = FeatureConfig(crop=case.residues, clusters=case.clusters, extra=case.extra, templates=0)
    arrays = collate([featurize(made, rows, cfg=cfg, passes=case.recycles + 1, training=training)])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {name: torch.from_numpy(np.ascontiguousarray(array)).to(device) for name, array in arrays.items()}


def _setup(kind: str, case: Case, precision: str = "fp32", save: bool = False, tiny: bool = False) -> Callable[[], Any]:
    """A training step, which waits for the device; returns the loss. Ours is an app's, the plain one has torch's Adam."""
    from hpcai import dist
    from hpcai.models.openfold import loss
    from hpcai.settings import StepConfig
    from hpcai.train import Step

    features, model = batch(case), network(case, save, tiny)
    device = features["aatype"].device
    wait: Callable[[], Any] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    if kind != "plain":
        words = {"optimizer": "adam", "precision": precision, "capture": "whole" if kind == "captured" else "none"}
        step = Step(model, loss, StepConfig.model_validate(words), dist.alone(device))

        def ours() -> Any:
            value = step(features)["loss"]
            wait()
            return value

        return ours
    optimizer = torch.optim.Adam(model.to(device).parameters(), 1e-3)

    def plain() -> Any:
        optimizer.zero_grad()
        with plainly():  # the backward pass too: there blocks that keep their inputs alone are computed again
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                value = loss(model, features)["loss"]
            value.backward()
        optimizer.step()
        wait()
        return value.detach()

    return plain


def _steps(case: Case, precision: str, save: bool, repeats: int, tiny: bool = False) -> dict[str, Any]:
    from hpcai.cli.bench import _alternate

    if torch.cuda.is_available():
        spent = {kind: _on_gpu(kind, case, precision, save, repeats, tiny) for kind in _KINDS}
        best = min((ms for ms in spent.values() if isinstance(ms, float)), default=0.0)
        ratio = round(spent["plain"] / best, 3) if isinstance(spent["plain"], float) else ""
        found = {f"{kind}_ms": ms for kind, ms in spent.items()} | {"plain_over_best": ratio}
        return {**case.row(), "precision": precision, "checkpoint": save, **found}
    times = _alternate({kind: _setup(kind, case, precision, save, tiny) for kind in ("plain", "ours")}, repeats)
    plain, ours = (statistics.median(cpu for cpu, _ in rows) for rows in times.values())
    digits = 4 if tiny else 2
    return {**case.row(), "plain_s": round(plain, digits), "ours_s": round(ours, digits), "plain_over_ours": round(plain / ours, 3)}


def _on_gpu(kind: str, case: Case, precision: str, save: bool, repeats: int, tiny: bool) -> float | str:
    """Milliseconds, or why there are none. Not in turns with the others: a graph would keep its memory."""
    from hpcai.cli.bench import _alternate

    try:
        times = _alternate({kind: _setup(kind, case, precision, save, tiny)}, repeats)[kind]
        return round(1e3 * statistics.median(wall for _, wall in times), 1)
    except (torch.OutOfMemoryError, ConfigError) as problem:  # a capture says either by the latter
        return "out of memory" if "out of memory" in str(problem) else str(problem)
    finally:
        torch.cuda.empty_cache()


def _once(part: str, kind: str, case: Case, save: bool, tiny: bool) -> dict[str, float]:
    from hpcai.cli.bench import high_water

    run = _setup(kind, case, save=save, tiny=tiny) if part == "memory" else _fold_setup(kind, case, tiny)
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    return {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall, "mb": high_water()}


def _fold_setup(kind: str, case: Case, tiny: bool) -> Callable[[], Any]:
    features, model = batch(case, training=False), network(case, tiny=tiny).eval()
    model.to(features["aatype"].device)

    def run() -> float:
        with torch.no_grad(), plainly() if kind == "plain" else nullcontext():
            return float(model(features).positions.sum())  # waits for the device

    return run


def _apart(part: str, kind: str, case: Case, tiny: bool, *more: str) -> dict[str, Any]:
    from hpcai.cli.bench import apart

    return apart(["openfold", part, "--case", *map(str, case), *(["--tiny"] if tiny else []), *more, "--one", kind])


def _memory(case: Case, tiny: bool = False) -> dict[str, Any]:
    forms = {"plain": ("plain",), "ours": ("ours",), "checkpoint": ("ours", "--checkpoint")}
    peak = {name: _apart("memory", words[0], case, tiny, *words[1:])["mb"] for name, words in forms.items()}
    ratio = round(peak["ours"] / peak["plain"], 3)
    return {**case.row(), **{f"{name}_mb": round(mb) for name, mb in peak.items()}, "ours_over_plain": ratio}


def _fold(case: Case, tiny: bool = False) -> dict[str, Any]:
    said = {kind: _apart("fold", kind, case, tiny) for kind in ("plain", "ours")}
    digits = {"cpu_s": 2, "wall_s": 2, "mb": None}
    return {**case.row(), **{f"{kind}_{unit}": round(said[kind][unit], n) for unit, n in digits.items() for kind in said}}


def _build(repeats: int, tiny: bool = False) -> dict[str, Any]:
    from hpcai.models.openfold import OpenFold, OpenFoldConfig

    cfg, spent = OpenFoldConfig.preset("tiny" if tiny else "initial"), []
    for _ in range(repeats):
        began = time.process_time()
        model = OpenFold(cfg)
        spent.append(time.process_time() - began)
    return {"parameters": sum(parameter.numel() for parameter in model.parameters()), "s": round(statistics.median(spent), 3)}


def _featurize(samples: int, tiny: bool = False) -> list[dict[str, Any]]:
    """Of all alignments, and of each third by depth, which is drawn evenly in its logarithm."""
    import numpy as np

    from hpcai.models.openfold.features import TEMPLATES, FeatureConfig, featurize

    draw, spent = np.random.default_rng(0), np.empty(samples)
    cfg = FeatureConfig(crop=32, clusters=8, extra=16, recycles=1) if tiny else FeatureConfig()
    depths = np.exp(draw.uniform(np.log(_DEPTHS[0]), np.log(_DEPTHS[1 if tiny else -1]), samples)).round()
    for number, depth in enumerate(depths):
        made = chain(int(draw.integers(*_LENGTHS, endpoint=True)), draw)
        rows = alignment(made, int(depth), draw)
        arrays = made.aatype, made.positions, made.mask, np.ones(1, np.float32)
        templates = {name: np.stack([array] * 4) for name, array in zip(TEMPLATES, arrays)}
        began = time.process_time()
        featurize(made, rows, templates, cfg, index=number)
        spent[number] = time.process_time() - began
    found = []
    for low, high in ((_DEPTHS[0], _DEPTHS[-1]), *pairwise(_DEPTHS)):
        some = spent[(depths >= low) & (depths < high + (high == _DEPTHS[-1]))]
        parts = dict(zip(("median_s", "p90_s", "p99_s", "most_s"), np.percentile(some, [50, 90, 99, 100]) if len(some) else ()))
        found.append({"depth": f"{low} to {high}", "samples": len(some), **{name: round(s, 3) for name, s in parts.items()}})
    return found
