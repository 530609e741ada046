"""``hpcai data stage SOURCE TARGET``: copy a data set to node-local disks; each byte is read once and sent to the other nodes.

 hpcai data stage /scratch/universe /local/universe
 srun --mpi=pmi2 --ntasks-per-node=4 hpcai data stage /scratch/universe '$SLURM_TMPDIR/universe' --shards 8
"""

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hpcai.cli import make_parser
from hpcai.cli.progress import Progress, show_progress
from hpcai.errors import DataError
from hpcai.log import format_bytes
from hpcai.stop import exit_on_signal

if TYPE_CHECKING:
    from hpcai.data.stage import Staged


def main(argv: Sequence[str]) -> int:
    args = make_parser("data stage", __doc__).parse_args(argv)

    from hpcai.data.stage import stage_in
    from hpcai.dist import start
    from hpcai.dist.collectives import all_gather_object

    with exit_on_signal() if argv == sys.argv[3:] else nullcontext(), start({"replicate": -1}) as mesh:  # not within a program
        try:
            with show_progress() if mesh.is_first else nullcontext(lambda _: None) as show:
                staged = stage_in(
                    args.source, args.target, mesh, shards=args.shards, verify=not args.no_verify, block=args.block << 20,
                    progress=lambda done, total: show(Progress("staged", done, total, "bytes")), node=args.node,
                )  # fmt: skip
        except DataError as error:  # the same on all ranks
            if mesh.is_first:
                print(f"hpcai data stage: {error}", file=sys.stderr)
            return 2
        nodes = {stats.node: stats for stats in all_gather_object(staged, mesh.peers)}
        if mesh.is_first:
            _print_summary(args.source, list(nodes.values()), not args.no_verify, args.json)
    return 0


def _print_summary(source: Path, nodes: "list[Staged]", verified: bool, as_json: bool) -> None:
    first = nodes[0]
    read, kept, total = (sum(getattr(node, key) for node in nodes) for key in ("read", "kept", "bytes"))
    speed = (total - kept) / max(first.seconds, 1e-9) / 1e9
    if as_json:
        result = {"source": str(source), "shards": first.shards, "exchange": first.exchange, "verified": verified}
        result |= {"seconds": round(first.seconds, 3), "read": read, "kept": kept, "bytes": total, "gb_per_s": round(speed, 3)}
        result["nodes"] = [asdict(node) | {"directory": str(node.directory)} for node in nodes]
        print(json.dumps(result))
        return
    count = f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}" + (f" in {first.shards} shards" if first.shards > 1 else "")
    print(
        f"staged {format_bytes(total - kept)} to {count} in {first.seconds:.1f} s ({speed:.2f} GB/s): read {format_bytes(read)} "
        f"from {source} ({format_bytes(read // len(nodes))} a node), kept {format_bytes(kept)}, "
        f"{'SHA-256 compared' if verified else 'not compared'}"
    )
