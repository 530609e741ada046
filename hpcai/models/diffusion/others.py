"""The settings of DiT and Flux as diffusers has them in config.json."""

from collections.abc import Mapping
from typing import Any

from hpcai.errors import ConfigError
from hpcai.models.diffusion.config import DiTConfig, FluxConfig

_DIT, _FLUX, _OLD = "DiTTransformer2DModel", "FluxTransformer2DModel", "Transformer2DModel"  # the last: of older files
_NAMES: dict[str, dict[str, tuple[str, Any]]] = {  # ours, and what is meant where a file does not say
    _DIT: {
        "num_attention_heads": ("heads", 16), "attention_head_dim": ("head", 72), "in_channels": ("inputs", 4),
        "out_channels": ("outputs", None), "num_layers": ("layers", 28), "sample_size": ("size", 32), "patch_size": ("patch", 2),
        "num_embeds_ada_norm": ("classes", 1000),
    },
    _FLUX: {
        "in_channels": ("inputs", 64), "num_layers": ("double", 19), "num_single_layers": ("single", 38),
        "attention_head_dim": ("head", 128), "num_attention_heads": ("heads", 24), "joint_attention_dim": ("tokens", 4096),
        "pooled_projection_dim": ("pooled", 768), "guidance_embeds": ("guidance", False),
        "axes_dims_rope": ("turned", [16, 56, 56]),
    },
}  # fmt: skip
_FIXED: dict[str, dict[str, Any]] = {
    _DIT: {
        "dropout": 0.0, "attention_bias": True, "activation_fn": "gelu-approximate", "upcast_attention": False,
        "norm_type": "ada_norm_zero", "norm_elementwise_affine": False, "norm_eps": 1e-5,
    },
    _FLUX: {"patch_size": 1, "out_channels": None},
}  # fmt: skip
_OF_OLD = {
    "attention_bias": False, "activation_fn": "geglu", "norm_type": "layer_norm", "norm_elementwise_affine": True,
    "sample_size": None, "patch_size": None, "num_embeds_ada_norm": None,
}  # fmt: skip
_USELESS = {"norm_num_groups"}  # said, but for networks of another kind


def from_config(found: Mapping[str, Any]) -> DiTConfig | FluxConfig:
    """Our settings from those of a config.json. Raises ConfigError for a network of another kind, and names each setting that it
    has and ours cannot have."""
    kind = found.get("_class_name")
    if kind == _OLD:
        kind, found = _DIT, {**_OF_OLD, **found}
    if kind not in _NAMES:
        raise ConfigError(f"a network of class {kind!r}; expected one of {', '.join((*_NAMES, _OLD))}")
    names, fixed = _NAMES[kind], dict(_FIXED[kind])
    if kind == _FLUX and found.get("out_channels") == found.get("in_channels", 64):
        fixed["out_channels"] = found.get("out_channels")
    wrong = [f"{name} is {found[name]!r}, expected {value!r}" for name, value in fixed.items() if found.get(name, value) != value]
    strange = found.keys() - names.keys() - fixed.keys() - _USELESS
    wrong += [f"{name} is {found[name]!r}, which is not known" for name in sorted(strange) if name[0] != "_" and found[name]]
    if wrong:
        raise ConfigError(f"a {kind} that cannot be had: {'; '.join(wrong)}")
    words = {own: found.get(name, default) for name, (own, default) in names.items()}
    if kind == _FLUX:
        words["turned"] = tuple(words["turned"])
    elif words["outputs"] is None:
        words["outputs"] = words["inputs"]
    try:
        return FluxConfig(**words) if kind == _FLUX else DiTConfig(**words)
    except ConfigError:
        raise
    except (TypeError, ValueError) as problem:
        raise ConfigError(f"settings of a {kind}: {problem}") from problem


def to_config(cfg: DiTConfig | FluxConfig) -> dict[str, Any]:
    """``cfg`` as config.json has it. Raises ConfigError for what cannot be said there."""
    if isinstance(cfg, FluxConfig) and cfg.theta != 10_000.0:
        raise ConfigError(f"theta is {cfg.theta}; files of others can only have 10000")
    kind = _FLUX if isinstance(cfg, FluxConfig) else _DIT
    said = {name: getattr(cfg, own) for name, (own, _) in _NAMES[kind].items()}
    return {"_class_name": kind} | {name: list(x) if isinstance(x, tuple) else x for name, x in said.items()} | _FIXED[kind]
