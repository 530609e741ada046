"""Print rank, world and results of collectives of every rank, one JSON line each, and exit with a code: meet.py SIZES CODE"""

import json
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as torch_dist

from hpcai import dist
from hpcai.dist.collectives import all_reduce_

sizes = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {"replicate": -1}
info = dist.read_rank_info()
with dist.start(sizes) as mesh:
    total = torch.tensor([float(mesh.rank)], dtype=torch.float64)
    if mesh.world > 1:
        torch_dist.all_reduce(total)
    along = {}
    for name in sizes:
        part = torch.tensor([float(mesh.rank)], dtype=torch.float64)
        if mesh[name].group is not None:
            torch_dist.all_reduce(part, group=mesh[name].group)
        along[name] = [mesh[name].rank, mesh[name].size, part.item()]
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of iterdir
            inodes.add(os.readlink(descriptor))
    rows = [line.split() for file in ("tcp", "tcp6") for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]]
    result = {
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "listens": [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes],
        "launcher": info.launcher, "rank": mesh.rank, "world": mesh.world, "local_rank": info.local_rank,
        "local_world": info.local_world, "total": total.item(), "along": along, "mpi": "mpi4py.MPI" in sys.modules,
    }  # fmt: skip
threads = [thread.name for thread in threading.enumerate() if thread.name not in ("MainThread", "hpcai-waits")]
os.write(1, (json.dumps(result | {"threads": threads, "group": torch_dist.is_initialized()}) + "\n").encode())
with dist.start(sizes) as mesh:  # a second start in the same processes, with new groups
    for axis in (mesh["replicate"], mesh["depth"], mesh.peers):
        assert all_reduce_(torch.ones(1), axis).item() == axis.size
    sys.exit(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
