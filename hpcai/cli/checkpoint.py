"""``hpcai checkpoint show FOLDER``: the checkpoints of a run, or one of them, and whether each is what was written.
``hpcai checkpoint export FOLDER FILE``: the weights of the newest, for people, as a run leaves them at its end.

FOLDER is a run's directory, its ``checkpoints``, or one ``step-...``. Every byte that is read is compared with its SHA-256.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from hpcai.cli import tables
from hpcai.errors import CheckpointError
from hpcai.log import format_bytes


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
        return give(words.folder, words.file)
    return show(words.folder)


def _checkpoints(folder: Path) -> list[Path]:
    """Those of a folder, oldest first. Raises CheckpointError where there is none."""
    from hpcai.train.checkpoint_reader import list_checkpoints

    every = (
        [folder] if (folder / "manifest.json").is_file() else list_checkpoints(folder) or list_checkpoints(folder / "checkpoints")
    )
    if not every:
        raise CheckpointError(f"{folder}: no checkpoint is there; expected a run's directory, its checkpoints, or one step-...")
    return every


def give(folder: Path, file: Path) -> int:
    """Write the weights of the newest checkpoint. Raises CheckpointError, and then there is no ``file``, or the one of before."""
    from hpcai.train.checkpoint_reader import export

    newest, partial = _checkpoints(folder)[-1], file.with_name(f".{file.name}.partial")
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
    from hpcai.train.checkpoint_reader import DamagedError, open_checkpoint

    rows, bad = [], 0
    for path in _checkpoints(folder):
        try:
            held = open_checkpoint(path)
        except DamagedError as error:
            rows.append((path.name, *["?"] * 6, str(error)))
            bad += 1
            continue
        problem, run = held.find_damage(), held.run
        files = {part.file for parts in held.tensors.values() for part in parts}
        count = format_bytes(sum((path / name).stat().st_size for name in files))
        where = f"{run.progress.step:,}", str(run.progress.epoch), str(run.world), f"{len(held.tensors):,}", count, str(len(files))
        rows.append((path.name, *where, problem or "whole"))
        bad += bool(problem)
    heads = "checkpoint", "step", "epoch", "processes", "tensors", "bytes", "files", "is"
    print(*tables.lines(rows, heads, left=("checkpoint", "is")), sep="\n")
    return 1 if bad else 0
