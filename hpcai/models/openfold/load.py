"""Load and export OpenFold weights under the names of hpcai and of all public codes. Only tensors are unpickled.

A form is a table of renamings, applied in order to the name of an hpcai tensor: the result is the names under which its parts are
read or written. A name has # for the number of a block, and begins with a dot while it is renamed.
"""

import itertools
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from hpcai.errors import CheckpointError
from hpcai.models.openfold.config import OpenFoldConfig
from hpcai.models.openfold.model import OpenFold
from hpcai.nn import weights as files
from hpcai.nn.deferred_init import deferred

Form = Literal["hpcai", "openfold", "openfold_v1", "mlperf", "mlperf_fused", "alphafold"]
Rules = tuple[tuple[str, str], ...]
_MODEL = "openfold"
_MAX_SHOWN = 4  # names in a message

_TABLES = tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))
_PARTS: dict[str, list[str]] = _TABLES.pop("parts")
_FUSED: dict[str, list[str]] = _TABLES.pop("fused")
_NAMES: dict[str, Rules] = {form: tuple(table.items()) for form, table in _TABLES.items()}
_MLPERF = _NAMES["openfold_v1"] + _NAMES["mlperf"]
_RENAMINGS: dict[Form, Rules] = {               # of names of OpenFold 2
    "openfold": (), "openfold_v1": _NAMES["openfold_v1"], "mlperf": _MLPERF, "mlperf_fused": _MLPERF,
    "alphafold": _NAMES["alphafold"],
}  # fmt: skip
FORMS = tuple(_RENAMINGS)


def public_names(name: str, form: Form = "openfold") -> list[str]:
    """Return a form's names of the tensors that make up one of hpcai's, in order."""
    return [part.name for part in _parts(name, form)]


class _Part(NamedTuple):
    name: str
    block: int | None  # its index in a stack of all blocks


def _parts(name: str, form: Form) -> list[_Part]:
    number = re.search(r"\.blocks\.(\d+)\.", name)
    if form == "hpcai" or number is None:
        return [_Part(part_name, None) for part_name in _rename(name, form)]
    names = _rename(name.replace(number[0], ".blocks.#.", 1), form)
    return [_Part(part_name.replace("#", number[1]), None if "#" in part_name else int(number[1])) for part_name in names]


@cache
def _rename(name: str, form: Form) -> tuple[str, ...]:
    if form == "hpcai":
        return (name,)
    name = f".{name}"
    parts = _PARTS | _FUSED if form == "mlperf_fused" else _PARTS
    fused = next((part for part in parts if part in name), "")
    names = tuple(name.replace(fused, public) for public in parts.get(fused, ("",)))
    for old, new in _NAMES["openfold"] + _RENAMINGS[form]:
        names = tuple(part.replace(old, new) for part in names)
    return tuple(_haiku_path(part) if form == "alphafold" else part[1:] for part in names)


def _haiku_path(name: str) -> str:
    path, _, leaf = name[1:].rpartition(".")
    leaves = {"weight": "scale", "bias": "offset"} if "_norm" in path else {"weight": "weights"}
    return f"alphafold/alphafold_iteration/{path.replace('.', '/')}//{leaves.get(leaf, leaf)}"


def from_public(state_public: Mapping[str, Tensor], names: Iterable[str], form: Form = "openfold") -> dict[str, Tensor]:
    """Return weights for a model whose state dict has ``names``; copies."""
    return {name: torch.cat([_to_hpcai(state_public[part.name], part, form) for part in _parts(name, form)]) for name in names}


def to_public(state: Mapping[str, Tensor], cfg: OpenFoldConfig, form: Form = "openfold") -> dict[str, Tensor]:
    """Return a model's weights under the names and in the shapes of a form; views where possible."""
    public: dict[str, Tensor] = {}
    stacks: dict[str, list[Tensor]] = {}
    for name, value in state.items():
        parts = _parts(name, form)
        for part, piece in zip(parts, value.chunk(len(parts))):
            piece = _to_alphafold(piece, part.name, _heads(name, cfg)) if form == "alphafold" else piece
            if part.block is None:
                public[part.name] = piece
            else:
                stacks.setdefault(part.name, []).append(piece)
    return public | {name: torch.stack(pieces) for name, pieces in stacks.items()}


def _to_hpcai(x: Tensor, part: _Part, form: Form) -> Tensor:
    x = x if part.block is None else x[part.block]
    if form != "alphafold":
        return x
    if part.name.endswith("output_w"):
        return x.flatten(0, 1).t()  # [H, C, out]
    return (x.flatten(-2) if _splits_heads(part.name) else x).t()  # [in, H, C] or [H, C]; [in, out]


def _to_alphafold(x: Tensor, name: str, heads: int) -> Tensor:
    if name.endswith("output_w"):
        return x.t().unflatten(0, (heads, -1))
    return x.t().unflatten(-1, (heads, -1)) if _splits_heads(name) else x.t()


def _splits_heads(name: str) -> bool:
    leaf = name.rpartition("/")[2]
    return leaf in ("query_w", "gating_w", "gating_b") or (leaf in ("key_w", "value_w") and "global" not in name)


def _heads(name: str, cfg: OpenFoldConfig) -> int:
    """Return the divisor of the channels of a tensor in AlphaFold: heads, or the width of the outer product."""
    if cfg.template is not None and name.startswith("template_embedder."):
        return cfg.template.pairs.heads if ".tri_att_" in name else cfg.template.heads
    msa, pairs = (cfg.extra.msa, cfg.extra.pairs) if name.startswith("extra_msa_stack.") else (cfg.rows, cfg.pairs)
    return pairs.heads if ".tri_att_" in name else msa.outer if ".outer_product_mean." in name else msa.heads


def in_form(state: Mapping[str, Tensor], cfg: OpenFoldConfig, form: Form) -> dict[str, Any]:
    """Return the content of a file of a form:

    - ``openfold``, ``openfold_v1``: a torch state dict of the public OpenFold 2, or of its first version;
    - ``mlperf``, ``mlperf_fused``: that of MLPerf HPC's reference and of NVIDIA's submissions, under ``alphafold_state_dict``;
    - ``alphafold``: DeepMind's arrays, in float32.
    """
    public = to_public(state, cfg, form)
    if form == "alphafold":
        return {name: value.float().numpy() for name, value in public.items()}
    # Clones: torch.save would write the whole storage of a view.
    public = {name: value.clone(memory_format=torch.contiguous_format) for name, value in public.items()}
    return {"alphafold_state_dict": public} if form.startswith("mlperf") else public


def load_weights(path: str | Path, cfg: OpenFoldConfig | None = None) -> OpenFold:
    """Load a model in evaluation mode and float32. The format is detected:

    - safetensors: from hpcai, with settings, or plain weights under the names of any form;
    - a torch state dict (``.pt``, ``.ckpt``) of the public OpenFold, 1 or 2, of MLPerf HPC's reference, of NVIDIA's submissions or
      hpcai; alone or within a checkpoint of Lightning, DeepSpeed or the reference, with the moving average if there is one;
    - DeepMind's ``params_model_N.npz`` for single chains.

    Without ``cfg`` the settings are inferred from the weights, or as published if these do not determine them: dropout rates, the
    passes of the structure module (8; 2 in the sizes of ``tiny``), and, except in AlphaFold's, the heads of attention over
    templates (as many as within a template). Raises CheckpointError if the format is unknown or the weights do not fit.
    """
    path = Path(path)
    state, saved_cfg = files.load_state(path, _MODEL, OpenFoldConfig)
    form: Form = "hpcai"
    if saved_cfg is None:
        matches = {each: sum(_has(state, name, each) for name in _MARKER_NAMES) for each in get_args(Form)}
        form = max(matches, key=lambda each: matches[each])
        if not matches[form]:
            known = f"{public_names(_MARKER_NAMES[0])[0]} of the public OpenFold, or its like of {', '.join(matches)}"
            raise CheckpointError(f"{path}: unknown names:  {_shorten(list(state))}; expected {known}")
        try:
            saved_cfg = cfg or _infer_settings(state, form)
        except (LookupError, RuntimeError, ValueError, ArithmeticError) as problem:
            # The network to which incomplete weights would belong; one block stands for all.
            template = OpenFoldConfig().template if _has(state, "template_embedder.template_pair_embedder.weight", form) else None
            likely = OpenFoldConfig.preset("tiny", template=template, heads={"tm": _has(state, "heads.tm.weight", form)})
            with deferred():
                expected = to_public(OpenFold(likely).state_dict(), likely, form)
            _check_names(_merge_blocks(state), _merge_blocks(expected), path, form)
            raise CheckpointError(f"{path}: weights by the names of {form!r} with shapes of no OpenFold: {problem}") from problem
    elif cfg is not None and cfg != saved_cfg:
        raise CheckpointError(f"{path}: contains settings that differ from cfg; load without cfg")
    with deferred():
        model = OpenFold(saved_cfg)
    own_state = model.state_dict()
    expected = to_public(own_state, saved_cfg, form)
    _check_names(state, expected, path, form)
    mismatched = [name for name, value in expected.items() if state[name].shape != value.shape]
    if mismatched:
        first = mismatched[0]
        raise CheckpointError(
            f"{path}: {_shorten(mismatched)} with other shapes than those of the settings: {first} is {tuple(state[first].shape)}, "
            f"expected {tuple(expected[first].shape)}; pass the settings of these weights, or none to infer them"
        )
    weights = from_public(state, own_state, form)
    model.load_state_dict({name: value.float() for name, value in weights.items()}, assign=True)
    return model.eval()


def _check_names(names: Collection[str], expected: Collection[str], path: Path, form: Form) -> None:
    missing, unexpected = ([name for name in left if name not in right] for left, right in ((expected, names), (names, expected)))
    if missing or unexpected:
        fault = f"{_shorten(unexpected)} unexpected; pass the settings of these weights, or none, and a file of one form"
        raise CheckpointError(f"{path}: weights by the names of {form!r} that do not fit: {_shorten(missing)} missing; {fault}")


def _merge_blocks(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(re.sub(r"\.blocks\.\d+\.", ".blocks.#.", name) for name in names))


def _shorten(names: list[str]) -> str:
    return f"{len(names)} ({', '.join(names[:_MAX_SHOWN])}{', ...' if len(names) > _MAX_SHOWN else ''})" if names else "none"


# Tensors that identify a form by their names.
_MARKER_NAMES = (
    "heads.plddt.layer_norm.weight", "structure_module.ipa.linear_q_points.weight",
    "extra_msa_stack.blocks.0.msa_att_row.attention.gate_bias", "evoformer.blocks.0.msa_att_row.attention.gate_bias",
    "evoformer.blocks.0.pair.pair_transition.layer_norm.weight",
)  # fmt: skip


def _has(state: Mapping[str, Tensor], name: str, form: Form) -> bool:
    return all(
        part.name in state and (part.block is None or state[part.name].shape[:1] > (part.block,)) for part in _parts(name, form)
    )


class _StateSizes(NamedTuple):
    """Sizes of a network, inferred from its weights."""

    state: Mapping[str, Tensor]
    form: Form

    def size(self, name: str, dim: int = 0) -> int:
        return from_public(self.state, [name], self.form)[name].shape[dim]

    def has(self, name: str) -> bool:
        return _has(self.state, name, self.form)

    def number(self, name: str) -> int:
        return next(count for count in itertools.count() if not self.has(name.format(count)))

    def rows(self, block: str) -> dict[str, int]:
        outer = self.size(f"{block}outer_product_mean.linear_1.weight")
        return {"outer": outer, **self._attention(f"{block}msa_att_row.", "linear_z", f"{block}msa_transition.")}

    def pairs(self, block: str) -> dict[str, int]:
        triangle = self.size(f"{block}tri_mul_out.layer_norm_out.weight")
        return {"triangle": triangle, **self._attention(f"{block}tri_att_start.", "linear", f"{block}pair_transition.")}

    def _attention(self, part: str, bias: str, transition: str) -> dict[str, int]:
        heads, wide = self.size(f"{part}{bias}.weight"), f"{transition}linear_1.weight"
        head = self.size(f"{part}attention.linear_o.weight", 1) // heads
        return {"heads": heads, "head": head, "transition": self.size(wide) // self.size(wide, 1)}

    def template(self) -> dict[str, Any] | None:
        prefix = "template_embedder."
        if not self.has(f"{prefix}template_pair_embedder.weight"):
            return None
        stack, query = f"{prefix}template_pair_stack.blocks.", f"{prefix}template_pointwise_att.linear_q.weight"
        sizes: dict[str, Any] = {
            "channels": self.size(f"{prefix}template_pair_embedder.weight"),
            "blocks": self.number(stack + "{}.tri_mul_out.linear_g.weight"),
        }
        if sizes["blocks"]:
            sizes["pairs"] = self.pairs(f"{stack}0.")
        heads = sizes.get("pairs", {"heads": 4})["heads"]
        if self.form == "alphafold":
            heads = self.state[public_names(query, self.form)[0]].shape[1]
        return sizes | {"heads": heads, "head": self.size(query) // heads}

    def structure(self) -> dict[str, int]:
        ipa, angles = "structure_module.ipa.", "structure_module.angle_resnet."
        heads = self.size(f"{ipa}head_weights")
        query_points = self.size(f"{ipa}linear_q_points.weight") // (3 * heads)
        return {
            "heads": heads, "head": self.size(f"{ipa}linear_q.weight") // heads, "query_points": query_points,
            "value_points": self.size(f"{ipa}linear_kv_points.weight") // (3 * heads) - query_points,
            "transition_layers": self.number("structure_module.transition.layers.{}.linear_1.weight"),
            "angle": self.size(f"{angles}linear_in.weight"), "angle_blocks": self.number(angles + "layers.{}.linear_1.weight"),
        }  # fmt: skip


def _infer_settings(state: Mapping[str, Tensor], form: Form) -> OpenFoldConfig:
    """Return the settings for the shapes of weights; heads are counted by the biases from pairs."""
    shapes = _StateSizes(state, form)
    sizes: dict[str, Any] = {
        "msa": shapes.size("recycling_embedder.layer_norm_m.weight"), "pair": shapes.size("recycling_embedder.layer_norm_z.weight"),
        "single": shapes.size("to_single.weight"), "blocks": shapes.number("evoformer.blocks.{}.msa_att_row.layer_norm_m.weight"),
        "heads": {"plddt": shapes.size("heads.plddt.linear_1.weight"), "tm": shapes.has("heads.tm.weight")},
        "extra": {
            "channels": shapes.size("extra_msa_embedder.linear.weight"),
            "blocks": shapes.number("extra_msa_stack.blocks.{}.msa_att_row.layer_norm_m.weight"),
        },
        "template": shapes.template(), "structure": shapes.structure(),
    }  # fmt: skip
    if sizes["blocks"]:
        sizes |= {"rows": shapes.rows("evoformer.blocks.0."), "pairs": shapes.pairs("evoformer.blocks.0.pair.")}
    if sizes["extra"]["blocks"]:
        block = "extra_msa_stack.blocks.0."
        sizes["extra"] |= {"msa": shapes.rows(block), "pairs": shapes.pairs(f"{block}pair.")}
    tiny = OpenFoldConfig.preset("tiny", template=sizes["template"], heads=sizes["heads"])
    cfg = OpenFoldConfig.model_validate(sizes)
    fewer_passes = cfg.model_copy(update={"structure": cfg.structure.model_copy(update={"passes": tiny.structure.passes})})
    return fewer_passes if fewer_passes == tiny else cfg
