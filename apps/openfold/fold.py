"""Predict structures:  python -m apps.openfold fold CHAINS.fasta [ALIGNMENTS] weights=FILE [out=folds mesh.axial=8 ...]

Chains are assigned to replicas of the network, longest first, each to the least loaded one. With ``mesh.axial`` a chain is sharded
over the ranks of a replica, which divides its memory. A chain whose output file exists is not folded again.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from apps.openfold.settings import FoldConfig
from hpcai import config
from hpcai.errors import DataError

MAX_NAME = 255 - len("..part.cif")              # bytes of a file's name while it is written


class Chain(NamedTuple):
    name: str
    sequence: str


def run(args: Sequence[str]) -> None:
    """Run the command with its command-line arguments; the first two that are no settings are chains and alignments."""
    names, settings = ["chains", "alignments"], []
    for word in args:
        plain = "=" not in word and not word.startswith("-") and not word.endswith((".yaml", ".yml"))
        settings.append(f"{names.pop(0)}={word}" if plain and names else word)
    sys.argv[1:] = settings
    config.run(FoldConfig, main, advice="the same command folds the chains that have no file yet")


def main(cfg: FoldConfig) -> None:
    from hpcai import dist

    with dist.start(cfg.mesh) as mesh:
        failed = fold(cfg, mesh)
        if failed and mesh.is_first:
            sys.stderr.write(f"error: {len(failed)} chains are not folded: {', '.join(why.split(':')[0] for why in failed)}\n")
    raise SystemExit(1 if failed else 0)


def fold(cfg: FoldConfig, mesh: Any) -> list[str]:
    """Fold all chains that have no output file yet. Return the errors of the skipped ones, of all ranks.

    Raises DataError for missing chains or alignments, with ``mesh.axial`` also for a chain that exceeds the memory of a rank.
    """
    import torch

    from hpcai.data.sampler import LargestFirst
    from hpcai.dist.collectives import all_gather_object, broadcast_object
    from hpcai.models.openfold import OpenFold, folding, parallelize
    from hpcai.train.auto_settings import has_fast_bf16

    todo = read_fasta(cfg.chains)
    alignments = [find_alignments(chain.name, cfg.alignments, len(todo)) for chain in todo]
    cfg.out.mkdir(parents=True, exist_ok=True)
    files = [cfg.out / f"{chain.name}.{cfg.form}" for chain in todo]
    missing = broadcast_object([number for number, file in enumerate(files) if not file.exists()], mesh.peers)
    replicas, problems = mesh["replicate"], []
    if mesh.is_first:
        print(f"{len(missing)} of {len(todo)} chains to fold, into {cfg.out}", flush=True)
    sampler = LargestFirst([len(todo[number].sequence) ** 2 for number in missing], replicas.size)
    local_chains = [index for index in sampler.order(0).tolist() if sampler.owner[index] == replicas.rank]
    model = parallelize(OpenFold.load(cfg.weights).to(mesh.device), mesh) if local_chains or mesh.model_parallel.size > 1 else None
    use_bf16 = cfg.precision == "bf16" or (cfg.precision == "auto" and mesh.device.type == "cuda" and has_fast_bf16(mesh.device))

    def read(chain: Chain, home: Path | None) -> tuple[dict[str, Any], str]:
        """Return the features of a chain, or the first error on the ranks that fold it together."""
        features, why, axial = {}, "", mesh["axial"].size
        try:
            if len(chain.sequence) < axial:
                raise DataError(f"{len(chain.sequence)} residues for {axial} ranks; fold it with a smaller mesh.axial")
            features = folding.prepare_features(model, chain.sequence, home, recycles=cfg.recycles, seed=cfg.seed, cfg=cfg.features)
        except DataError as problem:
            why = str(problem)
        return features, next(filter(None, all_gather_object(why, mesh.model_parallel)), "")

    for number in (missing[index] for index in local_chains):
        chain, began = todo[number], time.perf_counter()
        features, why = read(chain, alignments[number])
        try:
            if not why:
                with torch.autocast(mesh.device.type, torch.bfloat16, enabled=use_bf16):
                    result = folding.predict(model, chain.sequence, features)
        except DataError as problem:
            if mesh.model_parallel.size > 1:  # other ranks of this replica are still folding it
                raise DataError(f"{chain.name}: {problem}") from problem
            why = str(problem)
        if why:
            if mesh.model_parallel.rank == 0:
                problems.append(f"{chain.name}: {why}")
                sys.stderr.write(f"error: {problems[-1]}\n")
            continue
        if mesh.model_parallel.rank == 0:
            part = files[number].with_name(f".{chain.name}.part.{cfg.form}")
            result.write(part, chain.name)
            os.replace(part, files[number])  # atomic: never a partial file
            text = f"{len(chain.sequence):,} residues, mean pLDDT {result.plddt.mean():.1f}, {time.perf_counter() - began:.1f} s"
            print(f"{files[number]}: {text}", flush=True)
    return [problem for rank_problems in all_gather_object(problems, mesh.peers) for problem in rank_problems]


def find_alignments(name: str, folder: Path | None, chains: int) -> Path | None:
    """Return the folder of a chain's alignments. Raises DataError if it is missing."""
    if folder is None:
        return None
    if (folder / name).is_dir():
        return folder / name
    if chains == 1 and folder.exists():
        return folder
    raise DataError(f"{folder / name}: no such folder, expected alignments of the chain {name}; set alignments to null for none")


def read_fasta(path: Path) -> list[Chain]:
    """Read names (the first word after ">") and sequences, in the order of the file. The rest of a header is ignored, and so are
    lines that begin with ";" and a stop ("*") at the end of a sequence. Raises DataError for an invalid file, duplicate names, and
    names that are no valid file names."""
    try:
        text = path.read_text("utf-8-sig", errors="replace")
    except OSError as problem:
        raise DataError(f"{path}: cannot be read as FASTA ({problem})") from problem
    sequences: dict[str, list[str]] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith(">"):
            name = (line[1:].split() or [""])[0]
            valid = name.isascii() and len(name) <= MAX_NAME and Path(name).name == name and not name.startswith(".")
            if not name or name in sequences or not valid:
                why = "occurs twice" if name in sequences else f"is no valid file name (ASCII, {MAX_NAME} letters at most)"
                raise DataError(f"{path}: line {number}: the name {name!r} {why}; expected another one for each chain")
            sequences[name] = []
        elif line.strip() and not line.startswith(";"):
            if not sequences:
                raise DataError(f"{path}: line {number}: {line[:20]!r} precedes the first line that begins with '>'")
            if not line.isascii():
                raise DataError(f"{path}: line {number}: {line[:20]!r}, expected ASCII letters of a sequence")
            sequences[next(reversed(sequences))].append(line.strip())
    if not sequences:
        raise DataError(f"{path}: has no chain, expected lines that begin with '>' and sequences below them")
    if empty := [name for name, lines in sequences.items() if not "".join(lines).removesuffix("*")]:
        raise DataError(f"{path}: the chain {empty[0]} has no sequence")
    return [Chain(name, "".join(lines).removesuffix("*")) for name, lines in sequences.items()]
