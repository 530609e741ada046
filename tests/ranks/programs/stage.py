"""Stage in as nodes of PER_NODE ranks; RANK fails late in the first large file: stage.py SOURCE TARGET PER_NODE FAILURE RANK

Each rank prints at the end, in a JSON line, the transport of its exchange, or the DataError.
"""

import errno
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from hpcai import dist
from hpcai.data.stage import stage_in
from hpcai.errors import DataError

source, target, per_node, failure, failing_rank = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]


def pwrite(descriptor: int, data: Any, offset: int) -> int:
    if failing_rank == str(mesh.rank) and offset:
        os.write(1, f"FAULT {time.time():.3f}\n".encode())
        if failure == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if failure == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return original_pwrite(descriptor, data, offset)


original_pwrite, os.pwrite = os.pwrite, pwrite
with dist.start({"replicate": -1}) as mesh:
    node = f"node{mesh.rank // per_node}"
    result: dict[str, object] = {"rank": mesh.rank}
    try:
        result["exchange"] = stage_in(source, target / node, mesh, node=node, block=1 << 16).exchange
    except DataError as error:
        result["error"] = str(error)
    os.write(1, (json.dumps(result) + "\n").encode())
