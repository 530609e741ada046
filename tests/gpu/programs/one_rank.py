"""Captured steps whose gradients are added by real messages of a process group of one, then an orderly end or an error.

one_rank.py end|diverge: prints how often sums were asked for, then the time, and ends.
"""

import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import nn

from hpcai.dist.mesh import Axis, Dimension, Mesh
from hpcai.dist.watchdog import Watchdog
from hpcai.errors import DivergedError
from hpcai.settings import StepConfig
from hpcai.train.step import Step
from tests.gpu.machine import DEVICE, GRAPH, ON_GPU, wait

asked = 0
all_reduce = torch_dist.all_reduce


def counted(*words: Any, **more: Any) -> Any:
    global asked
    asked += 1
    return all_reduce(*words, **more)


torch_dist.all_reduce = counted
store = torch_dist.HashStore()
with Watchdog(0, 1, "127.0.0.1", store, os._exit):  # as hpcai.dist.start has, which makes no group of one
    backend = "cpu:gloo,cuda:nccl" if ON_GPU else "gloo"
    torch_dist.init_process_group(backend, store=torch_dist.PrefixStore("group", store), rank=0, world_size=1)
    mesh = Mesh({}, 1, 0, DEVICE)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
    cfg = StepConfig(capture="whole", bucket_mb=0.005)
    step = Step(model, lambda model, x: {"loss": model(x).square().mean()}, cfg, mesh, graph=GRAPH)
    buckets = step.reducer.buckets
    for bucket in buckets:
        bucket.axes = (Axis("replicate", 1, 0, Dimension([0])),)
    given = torch.ones(16, 64, device=DEVICE)
    losses = [step(given, 1e-2)["loss"] for _ in range(5)]
    wait()
    told = {"asked": asked, "buckets": len(buckets), "losses": [x.item() for x in losses], "time": time.time()}
    print(json.dumps(told), flush=True)
    if sys.argv[1] == "diverge":
        raise DivergedError("step 6: the loss is not finite", 6)
