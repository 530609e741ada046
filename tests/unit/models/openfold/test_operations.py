"""How many operations a GPU would be asked for in a step: counted without one, on fake tensors that take the kernels' way."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hpcai.kernels import attention, compiler, outer, room
from hpcai.models.openfold import OpenFold, OpenFoldConfig, loss, objective
from tests import proteins

gates_triton, layernorm_triton = (
    pytest.importorskip(f"hpcai.kernels.{name}_triton", reason="triton is not installed: operations are NOT counted")
    for name in ("gates", "layernorm")
)
VIEWS = {
    "view", "_unsafe_view", "expand", "permute", "transpose", "t", "slice", "select", "unsqueeze", "squeeze", "split", "detach",
    "alias", "as_strided", "unbind", "diagonal", "unfold", "lift_fresh", "_reshape_alias", "split_with_sizes", "device",
    "promote_types", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
}  # fmt: skip


class Count(TorchDispatchMode):
    """Operations by name, without those that move no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name not in VIEWS:
            self.names[name] += 1
        return function(*args, **(kwargs or {}))


class Launched:
    """A kernel that nobody runs: an operation when it is launched."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **words: torch.ones(1)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiler, "takes", lambda x: True)
    for module in (gates_triton, layernorm_triton):
        for name in ("_forward", "_backward"):
            monkeypatch.setattr(module, name, Launched())
    for module in (attention, objective, outer, room):
        monkeypatch.setattr(module, "several", lambda x, each, cpu: max(1, room._GPU // each))
    yield


def operations(blocks: int) -> Counter[str]:
    """Forward and backward of one pass under bf16 autocast, of a network with so many blocks."""
    model = OpenFold(OpenFoldConfig.preset("tiny", blocks=blocks, template=None))
    given, count = proteins.batch([12], dtype=torch.float32, passes=1), Count()
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():
            for store in (module._parameters, module._buffers):
                for name, value in store.items():
                    if value is not None:
                        fake = torch.empty(value.shape, dtype=value.dtype)
                        store[name] = nn.Parameter(fake) if isinstance(value, nn.Parameter) else fake
        batch = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in given.items()}
        with count:
            with torch.autocast("cpu", torch.bfloat16):
                value: Tensor = loss(model, batch)["loss"]
            value.backward()
    return count.names


def test_a_step_is_few_operations() -> None:
    """About 545 a block and 5,400 around the blocks, before there were kernels and before what follows the passes of the structure
    module was computed of all of them at once."""
    few, more = operations(2), operations(4)
    block = (more.total() - few.total()) / 2
    print(f"{block:.0f} operations a block, {few.total() - 2 * block:.0f} around; {dict((more - few).most_common(12))}")
    assert block <= 297 and few.total() - 2 * block <= 1500
