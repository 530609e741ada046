"""Run captured steps, then end or raise on all ranks, and print the order of deletions: captured.py end|diverge"""

import os
import sys
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import nn

from hpcai import dist
from hpcai.errors import DivergedError
from hpcai.settings import StepConfig
from hpcai.train.step import Step
from tests.cpu_graph import CPUGraph

destroy = torch_dist.destroy_process_group


def write_line(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def destroy_and_print(group: Any = None) -> None:
    write_line("destroy")
    destroy(group)


class PrintingGraph(CPUGraph):
    def reset(self) -> None:
        write_line("reset")


torch_dist.destroy_process_group = destroy_and_print
with dist.start({"replicate": -1}) as mesh:
    step = Step(nn.Linear(3, 1), lambda model, x: {"loss": model(x).mean()}, StepConfig(capture="whole"), mesh, graph=PrintingGraph)
    for samples in (2, 2, 2, 4, 4, 4):
        step(torch.ones(samples, 3))
    if sys.argv[1] == "diverge":
        raise DivergedError("step 3: the loss is not finite", 3)
