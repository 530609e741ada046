"""``hpcai bench NAME``: how fast one part is on this machine, and how much memory it takes.

NAME is an app, which is measured against its plain form (``hpcai bench APP --help``), or one of the parts that every app uses:

    step      ways to make a step faster: the update, capture, a divided optimizer, evaluation beside the training
    data      reading samples, against fio, torch's DataLoader, h5py and DALI
    gpu       the published training step of each app and each kernel beside its peers, on one GPU
    growth    what grows with ranks, files, tensors and steps: messages, sockets, file operations, time, memory
    all       each of them but gpu and growth briefly, in ten minutes
"""

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from hpcai.cli import apps

SHARED = ("step", "data", "gpu", "growth")
_BRIEFLY = {"step": ["--repeats", "5"], "data": ["direct", "peers", "--repeats", "1", "--gib", "1"]}


def main(argv: Sequence[str]) -> int:
    names = [*SHARED, *apps.names("trial"), "all"]
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{__doc__}\nNames here: {', '.join(names)}")
        return 0
    if argv[0] not in names:
        print(f"hpcai bench: there is no {argv[0]!r}; expected one of {', '.join(names)}", file=sys.stderr)
        return 2
    if argv[0] == "all":
        return _all("--json" in argv)
    if argv[0] in SHARED:
        return int(import_module(f"hpcai.cli.bench.{argv[0]}").main(argv[1:]))
    from hpcai.cli.bench.app import main as measure

    return measure(argv[0], argv[1:])


def _all(quiet: bool) -> int:
    """Each benchmark in a process of its own; one that fails is told and the others go on."""
    from hpcai.cli.bench.timing import apart

    found: dict[str, Any] = {}
    for name in [*(name for name in SHARED if name in _BRIEFLY), *apps.names("trial")]:
        found[name] = apart([name, *_BRIEFLY.get(name, ["steps", "memory", "--repeats", "1"]), "--json"])
        if not quiet:
            print(f"{name}: {json.dumps(found[name], indent=1)}", flush=True)
    print(json.dumps(found))
    return int(any("failed" in entry for entry in found.values()))
