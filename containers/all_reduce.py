"""Sum ones over the processes of torchrun, by NCCL (RCCL) if there are GPUs, otherwise by gloo: the test of an image on one node.

torchrun --standalone --nproc-per-node N containers/all_reduce.py
"""

import os
import re
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

CHOICES = re.compile(r"NCCL version \S+|Using network .*|NET/.*")
"""What NCCL logs of its version, and of the networks and plugins that it found and chose."""


def main() -> None:
    rank, device = int(os.environ["LOCAL_RANK"]), torch.device("cpu")
    log = Path(tempfile.gettempdir(), f"nccl-{os.getpid()}")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(log)}
    if torch.cuda.is_available():
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend)
    ones, world = torch.ones(1 << 20, device=device), dist.get_world_size()
    dist.all_reduce(ones)
    if wrong := int((ones != world).sum()):
        raise SystemExit(f"rank {rank}: {wrong} of {ones.numel()} sums of ones over {world} ranks by {backend} are not {world}")
    text = log.read_text(errors="replace") if log.exists() else ""
    log.unlink(missing_ok=True)
    if rank == 0:
        print(*dict.fromkeys(CHOICES.findall(text)), f"{backend}: the all-reduce over {world} ranks is correct", sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
