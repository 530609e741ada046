"""``hpcai bench unet3d [PART ...]``: a training step of the 3D U-Net against a plain network of the same layers, in both layouts.

    steps    forward, loss and backward of one volume: ours, and the plain network contiguous and channels-last, in turns
    memory   the peak of each, in a process of its own
    profile  where the time of our step goes, by kind of operation

Times are CPU seconds of one thread (wall milliseconds on a GPU), medians; the ratio is against the better layout of the plain
network. ``--precision auto`` is what an app takes; the plain network is then measured in float32.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any, cast

PARTS = ("steps", "memory", "profile")
_KINDS = ("contiguous", "channels_last", "ours")


def main(argv: Sequence[str]) -> int:
    import torch

    from hpcai.cli.bench import _machine, finish, parser_of_parts, shares

    parser = parser_of_parts("unet3d", __doc__, PARTS)
    parser.add_argument("--size", type=int, nargs="+", default=[64], help="edges of the volume, voxels; 128 is that of MLPerf")
    parser.add_argument("--divide", type=int, default=1, help=argparse.SUPPRESS)  # all widths, for a quick test
    parser.add_argument("--repeats", type=int, default=3, help="measured steps of each network")
    narrow = "bf16" if torch.cuda.is_available() else "fp32"
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), nargs="+", default=[narrow])
    parser.add_argument("--one", choices=_KINDS, help=argparse.SUPPRESS)
    words = parser.parse_args(argv)
    if words.one:  # the process that memory starts
        print(json.dumps({"mb": _peak(words.one, words.size[0], words.precision[0], words.divide)}))
        return 0
    found: dict[str, Any] = {"bench": "unet3d", **_machine()}
    cases = [(size, precision, words.divide) for size in words.size for precision in words.precision]
    if "steps" in words.parts:
        found["steps"] = [_steps(size, words.repeats, precision, divide) for size, precision, divide in cases]
    if "memory" in words.parts:
        found["memory"] = [_memory(*case) for case in cases]
    if "profile" in words.parts:
        found["profile"] = [
            {"size": case[0], "precision": case[1], **shares(_setup("ours", *case), "instance norm and rectifier")}
            for case in cases
        ]  # fmt: skip
    return finish(found, PARTS, words.json)


def plain_network(cfg: Any) -> Any:
    """The same layers as anybody writes them down, torch's own, one operation after the other; weights are in the same order."""
    from itertools import pairwise

    import torch
    from torch import Tensor, nn

    def layer(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
        conv = nn.Conv3d(inputs, outputs, 3, stride, padding=1, bias=False)
        return nn.Sequential(conv, nn.InstanceNorm3d(outputs, affine=True), nn.ReLU(inplace=True))

    def two(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
        return nn.Sequential(layer(inputs, outputs, stride), layer(outputs, outputs))

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = cfg.filters
            self.first = two(cfg.channels, widths[0])
            self.down = nn.ModuleList(two(i, o, 2) for i, o in pairwise((*widths, widths[-1])))
            ups = list(pairwise((widths[-1], *reversed(widths))))
            self.up = nn.ModuleList(nn.ModuleList((nn.ConvTranspose3d(i, o, 2, 2), two(2 * o, o))) for i, o in ups)
            self.output = nn.Conv3d(widths[0], len(cfg.classes), 1)

        def forward(self, x: Tensor) -> Tensor:
            skips = [x := self.first(x)]
            for down in self.down:
                skips.append(x := down(x))
            for up, skip in zip(self.up, skips[-2::-1]):
                transposed, convs = cast(nn.ModuleList, up)
                x = convs(torch.cat((transposed(x), skip), 1))
            return self.output(x)

    return Plain()


def plain_loss(logits: Any, label: Any) -> Any:
    """As MLPerf's reference writes it: cross entropy, and dice of a softmax and of one-hot labels."""
    import torch.nn.functional as F

    label = label.long()
    guess = F.softmax(logits, 1)[:, 1:]
    true = F.one_hot(label, logits.shape[1]).permute(0, 4, 1, 2, 3).float()[:, 1:]
    over = (2, 3, 4)
    dice = (2 * (guess * true).sum(over) + 1e-6) / (guess.sum(over) + true.sum(over) + 1e-6)
    return (F.cross_entropy(logits, label) + (1 - dice).mean()) / 2


def _setup(kind: str, size: int, precision: str, divide: int = 1) -> Callable[[], Any]:
    """Forward and backward of one network, which wait for the device; returns the loss."""
    import torch

    from hpcai.cli.bench import forward_backward
    from hpcai.models import unet3d
    from hpcai.train.choices import fast_bf16

    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    narrow = precision == "bf16" or (precision == "auto" and kind == "ours" and fast_bf16(device))
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(1, size, size, size, generator=generator).to(device)
    label = torch.randint(0, 3, image.shape, dtype=torch.uint8, generator=generator).to(device)
    cfg = unet3d.UNet3DConfig(filters=tuple(n // divide for n in unet3d.UNet3DConfig().filters))
    torch.manual_seed(0)
    if kind == "ours":
        ours = unet3d.UNet3D(cfg).to(device)
        return forward_backward(ours, lambda: unet3d.loss(ours, unet3d.Batch(image, label))["loss"], device, narrow)
    form = torch.channels_last_3d if kind == "channels_last" else torch.contiguous_format
    plain = plain_network(cfg).to(device, memory_format=form)

    def loss() -> Any:
        return plain_loss(plain(image[:, None].contiguous(memory_format=form)).float(), label)

    return forward_backward(plain, loss, device, narrow)


def _steps(size: int, repeats: int, precision: str, divide: int = 1) -> dict[str, Any]:
    import torch

    from hpcai.cli.bench import _alternate

    times = _alternate({kind: _setup(kind, size, precision, divide) for kind in _KINDS}, repeats)
    on_gpu = torch.cuda.is_available()
    unit, scale = ("ms", 1e3) if on_gpu else ("s", 1.0)
    spent = {kind: scale * statistics.median(t[on_gpu] for t in rows) for kind, rows in times.items()}
    return {
        "size": size, "precision": precision, **{f"{kind}_{unit}": round(value, 3) for kind, value in spent.items()},
        "ratio": round(min(spent["contiguous"], spent["channels_last"]) / spent["ours"], 3),
    }  # fmt: skip


def _peak(kind: str, size: int, precision: str, divide: int) -> int:
    from hpcai.cli.bench import high_water

    run = _setup(kind, size, precision, divide)
    for _ in range(2):
        run()
    return round(high_water())


def _memory(size: int, precision: str, divide: int = 1) -> dict[str, Any]:
    from hpcai.cli.bench import peak_of

    words = ["unet3d", "--size", str(size), "--precision", precision, "--divide", str(divide)]
    return {"size": size, "precision": precision, **{f"{kind}_mb": round(peak_of([*words, "--one", kind])) for kind in _KINDS}}
