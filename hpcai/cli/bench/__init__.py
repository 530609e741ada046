"""``hpcai bench NAME``: measure the speed and memory of an app or a component on this machine.

NAME is an app, which is compared with its plain implementation (``hpcai bench APP --help``), or a shared component:

    data      reading samples, compared with fio, torch's DataLoader and h5py
    gpu       the published training step of each app, and each kernel compared with its peers, on one GPU
"""

from collections.abc import Sequence
from importlib import import_module

from hpcai.cli import apps
from hpcai.errors import ConfigError

SHARED = ("data", "gpu")


def main(argv: Sequence[str]) -> int:
    names = [*SHARED, *apps.with_part("benchmarks")]
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{__doc__}\nNames here: {', '.join(names)}")
        return 0
    if argv[0] not in names:
        raise ConfigError(f"there is no {argv[0]!r}; expected one of {', '.join(names)}")
    if argv[0] in SHARED:
        return int(import_module(f"hpcai.cli.bench.{argv[0]}").main(argv[1:]))
    from hpcai.cli.bench.app import main as measure

    return measure(argv[0], argv[1:])
