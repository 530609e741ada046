"""Captured steps that all-reduce gradients in a process group of one rank, then a normal end or an error.

one_rank.py end|diverge: prints the number of all-reduce calls and the time as JSON, and ends.
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
from tests.gpu.device import DEVICE, GRAPH, ON_GPU, synchronize

num_calls = 0
all_reduce = torch_dist.all_reduce


def counting_all_reduce(*args: Any, **kwargs: Any) -> Any:
    global num_calls
    num_calls += 1
    return all_reduce(*args, **kwargs)


torch_dist.all_reduce = counting_all_reduce
store = torch_dist.HashStore()
with Watchdog(0, 1, "127.0.0.1", store, os._exit):  # as in hpcai.dist.start, which creates no group of one rank
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
    inputs = torch.ones(16, 64, device=DEVICE)
    losses = [step(inputs, 1e-2)["loss"] for _ in range(5)]
    synchronize()
    report = {"calls": num_calls, "buckets": len(buckets), "losses": [x.item() for x in losses], "time": time.time()}
    print(json.dumps(report), flush=True)
    if sys.argv[1] == "diverge":
        raise DivergedError("step 6: the loss is not finite", 6)
