"""Benchmark of OpenFold:  hpcai bench openfold | hpcai ablate openfold [features.crop=64 ...]

The plain form is the same function of the same weights in unfused, unchunked operations of torch: all logits, gates, outer products
and distances at once. Chains and alignments are synthetic, without templates. ``checkpoint`` is the optimized form with activation
checkpointing of blocks.

    mpiexec -n 2 hpcai ablate openfold mesh.axial=2    # gain or loss of sharding a chain over two ranks
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from apps.openfold.data import FIELDS, Chains, open_rows, parse_chain
from apps.openfold.settings import Config
from data_prep import chains
from hpcai.cli.benchmarks import Enabled, Switch, Training, Workload
from hpcai.data.splits import make_loader
from hpcai.dist import Mesh
from hpcai.dist.environment import read_rank_info
from hpcai.kernels import attention, gates, layernorm, outer_product, triangle_multiplication, triton_support
from hpcai.models.openfold import OpenFold, evoformer, featurize, layers, loss, objective, parallelize, score
from hpcai.models.openfold import attention as attentions
from hpcai.models.openfold.features import collate
from hpcai.models.openfold.residues import ATOM37_EXISTS
from hpcai.nn import layernorm as norms

_CUT = "cut chains"


class Benchmark(Workload):
    settings, fields, unit = Config, tuple(FIELDS), "chains"
    loss, metric = staticmethod(loss), staticmethod(score)
    ragged = frozenset(name for name, (_, shape) in FIELDS.items() if shape and isinstance(shape[0], str))
    variants = {"checkpoint": ("model.checkpoint=true",)}
    compile_scope, slow_compile = "blocks", True

    def switches(self, cfg: Config, mesh: Mesh) -> list[Switch]:
        on_gpu, ranks = mesh.device.type == "cuda", mesh["axial"].size
        same = triton_support.MISSING if on_gpu else "on a CPU they are those of torch"
        switches = [
            Switch("attention", "gated attention whose logits and probabilities are never in memory"),
            Switch("layer norms", "fused layer norms, forward and backward, with outputs in the dtype of the next product", same),
            Switch("gates", "products with a sigmoid that save only their inputs"),
            Switch("triangles", "triangle products and biases of heads written in the layout of their reader, without copies"),
            Switch("outer product", "outer products of a few residues at a time, recomputed in the backward pass"),
            Switch("parts", "losses in chunks that fit a cache, without gradients also transitions and triangles"),
        ]
        if ranks == 1:
            return switches
        uneven = None if cfg.data.batch % mesh.world == 0 else f"data.batch is {cfg.data.batch}, no multiple of {mesh.world} ranks"
        description = f"mesh.axial={ranks}: each chain is sharded over {ranks} ranks, instead of one chain per rank"
        return [*switches, Switch(_CUT, description, uneven)]

    def defaults(self, on_gpu: bool) -> Sequence[str]:
        return [*super().defaults(on_gpu), f"data.batch={read_rank_info().world or 1}"]

    def context(self, enabled: Enabled) -> AbstractContextManager[Any]:
        return use_reference(enabled)

    @contextmanager
    def training(self, cfg: Config, mesh: Mesh, enabled: Enabled) -> Iterator[Training]:
        if any(switch.name == _CUT and switch.why_not is None for switch in self.switches(cfg, mesh)) and _CUT not in enabled:
            mesh = Mesh({"replicate": mesh.world}, mesh.world, mesh.rank, mesh.device)
        with super().training(cfg, mesh, enabled) as prepared:
            yield prepared

    def build(self, cfg: Config, mesh: Mesh, enabled: Enabled) -> nn.Module:
        model = parallelize(OpenFold(cfg.model), mesh)
        torch.manual_seed(cfg.train.seed)
        for parameter in model.parameters():
            if not parameter.any():  # output layers of branches start at 0, and so would all gradients inside
                torch.nn.init.normal_(parameter, std=0.01)
        return model

    def random_sample(self, cfg: Config, random: np.random.Generator) -> tuple[Any, ...]:
        """Return residues along a random walk with atoms at random around them, and an alignment of sequences that share 30 to 90 %
        of the residues; 2 % of the positions have deletions."""
        rows, length = shape = cfg.features.clusters + cfg.features.extra, cfg.features.crop or 256
        aatype = random.integers(0, 20, length)
        mask = ATOM37_EXISTS[aatype].astype("float32")
        positions = random.normal(0, 2.2, (length, 1, 3)).cumsum(0) + random.normal(0, 1.5, (length, 37, 3))
        changed = random.random(shape, np.float32) < random.uniform(0.1, 0.7, (rows, 1))
        msa = np.where(changed, random.integers(0, 22, shape, np.int8), aatype.astype(np.int8))
        deletions = random.integers(1, 20, shape, np.int32) * (random.random(shape, np.float32) < 0.02)
        msa[0], deletions[0] = aatype, 0
        values = {
            "residues": length, "letters": msa.size, "name": b"synthetic", "resolution": 2.0, "release": 0, "cluster_size": 1,
            "hits": 0, "places": 0, "aatype": aatype, "positions": positions * mask[..., None], "mask": mask,
            "msa": msa.reshape(-1), "deletions": deletions.reshape(-1), "hit_row": [], "hit_sum_probs": [], "hit_places": [],
        }  # fmt: skip
        return tuple(np.asarray(values[name], FIELDS[name][0]) for name in FIELDS)

    def collate(self, cfg: Config, samples: list[tuple[Any, ...]]) -> Any:
        each = []
        for number, values in enumerate(samples):
            protein, rows = parse_chain(chains.unflatten(dict(zip(FIELDS, values)), "a synthetic chain"))
            features = featurize(protein, rows, cfg=cfg.features)  # the mask does not depend on a sample's position in a batch
            each.append(features | {"index": np.full(cfg.features.recycles + 1, number)})  # as from a loader
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in collate(each).items()}

    def loader(self, cfg: Config, mesh: Mesh, split: str, **kwargs: Any) -> Any:
        rows = open_rows(cfg, split, FIELDS, mesh)
        return make_loader(
            Chains(rows, np.arange(len(rows)), cfg.features, cfg.train.seed), cfg.data.batch, cfg.data, mesh, **kwargs)


@contextmanager
def use_reference(enabled: Enabled = frozenset()) -> Iterator[None]:
    """Context manager: compute network and loss by unfused, unchunked operations of torch, except for ``enabled`` switches."""
    def channels_first(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, weight, bias).permute(0, 3, 1, 2)

    def single(function: Callable[[slice], Tensor], count: int, *_: Any) -> Tensor:
        return function(slice(0, count))

    def gate(x: Tensor, g: Tensor, mask: Tensor | None = None) -> Tensor:
        return gates.reference(x, g, mask).to(x.dtype)  # a mask in float32 would promote the product beyond its kernels' dtype

    def halves(xg: Tensor, mask: Tensor | None = None) -> Tensor:
        return gates.reference_glu_halves(xg, mask).to(xg.dtype)

    forms: dict[str, Sequence[tuple[Any, str, Any]]] = {
        "attention": [(attentions, "gated_attention", attention.reference)],
        "layer norms": [(norms, "layer_norm", layernorm.reference)],
        "gates": [(evoformer, "gate", gate), (evoformer, "glu_halves", halves)],
        "triangles": [
            (evoformer, "triangle_multiplication", triangle_multiplication.reference),
            (evoformer, "channels_first", channels_first), (attentions, "channels_first", channels_first),
        ],
        "outer product": [(evoformer, "outer_product", outer_product.reference)],
        "parts": [(evoformer, "map_chunks", single), (layers, "map_chunks", single), (objective, "chunk_size", lambda *_: 1 << 60)],
    }  # fmt: skip
    patches = [form for switch, group in forms.items() if switch not in enabled for form in group]
    with ExitStack() as stack:
        for module, name, function in patches:
            stack.enter_context(mock.patch.object(module, name, function))
        yield
