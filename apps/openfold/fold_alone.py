"""What `hpcai bench openfold fold` starts in a process of its own, so that its peak of memory is that of one chain."""

import json
import time
from contextlib import nullcontext

import torch

from apps.openfold.trial import Trial, TrialConfig, plainly
from hpcai import dist
from hpcai.cli.bench.timing import high_water, wait


def fold(kind: str, residues: int, settings: str) -> None:
    """Fold one chain in this process and print what it took."""
    torch.set_num_threads(1)
    cfg = TrialConfig.model_validate_json(settings)
    cfg = cfg.model_copy(update={"features": cfg.features.model_copy(update={"crop": residues})})
    subject, mesh = Trial(), dist.alone()
    features = subject.random_batch(cfg, [0], mesh.device)
    model = subject.build(cfg, mesh, frozenset({"kernels"})).eval().to(mesh.device)
    cpu, wall = time.process_time(), time.perf_counter()
    with torch.no_grad(), plainly() if kind == "plain" else nullcontext():
        model(features)
    wait()
    spent = {"cpu_s": round(time.process_time() - cpu, 2), "wall_s": round(time.perf_counter() - wall, 2)}
    print(json.dumps({**spent, "mb": round(high_water())}))  # another process reads it
