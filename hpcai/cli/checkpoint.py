"""``hpcai checkpoint show FOLDER``: the checkpoints of a run, or one of them, and whether each is what was written.
``hpcai checkpoint export FOLDER FILE``: the weights of the newest, for people, as a run leaves them at its end.

FOLDER is a run's directory, its ``checkpoints``, or one ``step-...``. Every byte that is read is compared with its SHA-256.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from hpcai.cli import tables
from hpcai.errors import CheckpointError
from hpcai.log import size


def main(argv: Sequence[str]) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="hpcai checkpoint", description=__doc__, formatter_class=form)
    parser.add_argument("action", choices=["show", "export"])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE", help="where export writes, such as model.safetensors")
    words = parser.parse_args(argv)
    if (words.file is None) != (words.action == "show"):
        parser.error("export takes a FILE to write, and show takes none")
    if words.file is not None:
        return export_weights(words.folder, words.file)
    return show(words.folder)


def _find_checkpoints(folder: Path) -> list[Path]:
    """Those of a folder, oldest first. Raises CheckpointError where there is none."""
    from hpcai.train.saved import found

    every = [folder] if (folder / "manifest.json").is_file() else found(folder) or found(folder / "checkpoints")
    if not every:
        raise CheckpointError(f"{folder}: no checkpoint is there; expected a run's directory, its checkpoints, or one step-...")
    return every


def export_weights(folder: Path, file: Path) -> int:
    """Write the weights of the newest checkpoint. Raises CheckpointError, and then there is no ``file``, or the one of before."""
    from hpcai.train.saved import export

    newest, partial = _find_checkpoints(folder)[-1], file.with_name(f".{file.name}.partial")
    try:
        export(newest, partial)
        partial.replace(file)
    except OSError as problem:
        raise CheckpointError(f"{problem.filename or file}: {problem.strerror}") from problem
    finally:
        partial.unlink(missing_ok=True)
    print(f"{file}: the weights of {newest}")
    return 0


def show(folder: Path) -> int:
    """Print what is there -> 1 where a checkpoint is damaged. Raises CheckpointError where there is none."""
    from hpcai.train.saved import DamagedError, opened

    rows, bad = [], 0
    for path in _find_checkpoints(folder):
        try:
            held = opened(path)
        except DamagedError as error:
            rows.append((path.name, *["?"] * 6, str(error)))
            bad += 1
            continue
        problem, run = held.damage(), held.run
        files = {part.file for parts in held.tensors.values() for part in parts}
        count = size(sum((path / name).stat().st_size for name in files))
        where = f"{run.progress.step:,}", str(run.progress.epoch), str(run.world), f"{len(held.tensors):,}", count, str(len(files))
        rows.append((path.name, *where, problem or "whole"))
        bad += bool(problem)
    heads = "checkpoint", "step", "epoch", "processes", "tensors", "bytes", "files", "is"
    print(*tables.lines(rows, heads, left=("checkpoint", "is")), sep="\n")
    return 1 if bad else 0
