"""A data source whose samples are their indices."""

from typing import Any

import numpy as np


class IndexSource:
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def sample(self, index: int, epoch: int) -> Any:
        return np.array(index)

    def describe(self, index: int) -> str:
        return str(index)
