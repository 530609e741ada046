"""``hpcai checkpoint show FOLDER``: list the checkpoints of a run, or one of them, and verify each against its manifest.
``hpcai checkpoint export FOLDER FILE``: export the weights of the newest checkpoint, in the form that a run writes at its end.

FOLDER is a run's directory, its ``checkpoints``, or one ``step-...``. Every byte read is verified by SHA-256.
"""

from collections.abc import Sequence
from pathlib import Path

from hpcai.cli import make_parser, tables
from hpcai.errors import CheckpointError
from hpcai.log import format_bytes


def main(argv: Sequence[str]) -> int:
    parser = make_parser("checkpoint", __doc__)
    args = parser.parse_args(argv)
    if (args.file is None) != (args.action == "show"):
        parser.error("export takes a FILE to write, and show takes none")
    return show(args.folder) if args.action == "show" else export_weights(args.folder, args.file)


def _find_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, oldest first. Raises CheckpointError if there is none."""
    from hpcai.train.checkpoint_reader import list_checkpoints

    if (folder / "manifest.json").is_file():
        return [folder]
    if not (checkpoints := list_checkpoints(folder) or list_checkpoints(folder / "checkpoints")):
        raise CheckpointError(f"{folder}: no checkpoint found; expected a run's directory, its checkpoints, or one step-...")
    return checkpoints


def export_weights(folder: Path, file: Path) -> int:
    """Write the weights of the newest checkpoint. Raises CheckpointError; ``file`` is then unchanged or absent."""
    from hpcai.train.checkpoint_reader import export

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
    """Print the checkpoints. Return 1 if one is damaged. Raises CheckpointError if there is none."""
    from hpcai.train.checkpoint_reader import open_checkpoint

    rows, damaged = [], 0
    for path in _find_checkpoints(folder):
        try:
            reader = open_checkpoint(path)
        except CheckpointError as error:
            rows.append((path.name, *["?"] * 6, str(error).removeprefix(f"{path}: ")))
            damaged += 1
            continue
        problem, run = reader.find_damage(), reader.run
        files = {part.file for parts in reader.tensors.values() for part in parts}
        count = format_bytes(sum((path / name).stat().st_size for name in files))
        row = f"{run.progress.step:,}", str(run.progress.epoch), str(run.world), f"{len(reader.tensors):,}", count, str(len(files))
        rows.append((path.name, *row, problem or "whole"))
        damaged += bool(problem)
    heads = "checkpoint", "step", "epoch", "processes", "tensors", "bytes", "files", "is"
    print(*tables.lines(rows, heads, left=("checkpoint", "is")), sep="\n")
    return 1 if damaged else 0
