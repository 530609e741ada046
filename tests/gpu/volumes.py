"""Volumes of random integers in .npy files, and a data set that reads them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcai.data.direct import MemoryPool, Reader
from hpcai.data.layout import npy_layout


def make_volume(index: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(index).integers(0, 100, shape).astype(np.int16)


class Volumes:
    """Samples read with direct I/O into a small pool of pinned memory, so that it is soon reused."""

    def __init__(self, files: list[Path], device: torch.device, threads: int = 4, max_unused: int = 1 << 20) -> None:
        self.paths = files
        self.layouts = [npy_layout(path) for path in files if path.suffix == ".npy"]
        memory = MemoryPool(max_unused=max_unused, pin=device if device.type == "cuda" else None)
        self.reader = Reader("auto", threads=threads, memory=memory)

    def __len__(self) -> int:
        return len(self.paths)

    def sample(self, index: int, epoch: int) -> dict[str, Any]:
        return {"volume": self.layouts[index].read(self.reader), "index": np.array(index)}

    def describe(self, index: int) -> str:
        return self.paths[index].name

    def close(self) -> None:
        self.reader.close()
