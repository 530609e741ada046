"""stage.py SOURCE TARGET PER_NODE HOW RANK: stage as nodes of PER_NODE ranks; late in the first large file RANK fails as told.

Every rank says at the end, in a JSON line, how blocks went around, or which DataError was raised.
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

source, target, per_node, how, who = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]


def pwrite(descriptor: int, data: Any, offset: int) -> int:
    if who == str(mesh.rank) and offset:
        os.write(1, f"GRIEF {time.time():.3f}\n".encode())
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return plain(descriptor, data, offset)


plain, os.pwrite = os.pwrite, pwrite
with dist.start({"replicate": -1}) as mesh:
    node = f"node{mesh.rank // per_node}"
    said: dict[str, object] = {"rank": mesh.rank}
    try:
        said["exchange"] = stage_in(source, target / node, mesh, node=node, block=1 << 16).exchange
    except DataError as error:
        said["error"] = str(error)
    os.write(1, (json.dumps(said) + "\n").encode())
