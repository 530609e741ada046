"""Networks from folders as diffusers has them, and into such: config.json beside safetensors files."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from hpcai.config import Settings
from hpcai.errors import CheckpointError, ConfigError
from hpcai.models.diffusion.config import DiffusionConfig, DiTConfig, FluxConfig, UNetConfig, VAEConfig
from hpcai.models.diffusion.dit import DiT
from hpcai.models.diffusion.flux import Flux
from hpcai.models.diffusion.unet import UNet
from hpcai.models.diffusion.vae import VAE
from hpcai.nn import weights
from hpcai.nn.deferred_init import load_deferred
from hpcai.nn.safetensors_files import save_sharded, open_tensors

if TYPE_CHECKING:
    from hpcai.models.diffusion.model import Diffusion

CONFIG, FILE = "config.json", "diffusion_pytorch_model.safetensors"
_INDEX = f"{FILE}.index.json"
_SHARD_BYTES = 10_000_000_000  # bytes of a file
_RUN_SETTINGS = {"dropout", "recompute", "zero"}  # settings that a run may have otherwise than the weights that it begins with
_VERSION = "0.42.1"  # of diffusers, whose words these are
_LEGACY_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}  # in older autoencoders
_LEGACY_ATTENTION = re.compile(r"(.*\.attentions\.\d+)\.(query|key|value|proj_attn)\.(weight|bias)")
_IGNORED = {"sample_size", "force_upcast", "upcast_attention", "addition_time_embed_dim", "addition_embed_type_num_heads"}

State = dict[str, Tensor]
SettingNames = dict[str, tuple[str, Any]]  # of settings by diffusers': ours, and what is meant where a file does not say (...: it must)


class DiffusersClass(NamedTuple):
    """What a class of diffusers is here."""

    network: Callable[[Any], nn.Module]
    """of its settings"""
    from_config: Callable[[Mapping[str, Any], Path], Settings]
    """Settings from config.json, whose path errors name. Raises ConfigError for what the network does not do."""
    to_config: Callable[[Any], dict[str, Any] | None]
    """config.json from settings; None: they are not those of this class"""
    from_names: Callable[[State], State]
    """weights by our names, from those by the names of the files"""
    to_names: Callable[[Mapping[str, Tensor]], State] = dict
    """and back"""


def read_folder(path: str | Path) -> tuple[Settings, State]:
    """Settings and weights, by the names that our networks have, from a folder of diffusers.

    Raises CheckpointError for weights that are missing, superfluous, damaged, not finite, no floating numbers or of other sizes
    than the settings say, ConfigError for a network of another kind or with settings that ours does not honour.
    """
    path = Path(path)
    kind, cfg = _settings(path)
    tensors = open_tensors(path / _INDEX if (path / _INDEX).exists() else path / FILE)
    found: State = {}
    for name, one in tensors.items():
        tensor = one[tuple(slice(None) for _ in one.size)]
        if not tensor.is_floating_point():
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(f"{one.path}: {name} holds {dtype}; expected floating numbers: fetch or save it again")
        if not tensor.isfinite().all():
            raise CheckpointError(f"{one.path}: {name} has numbers that are not finite; fetch or save it again")
        found[name] = tensor
    state = kind.from_names(found)
    with torch.device("meta"):
        known = kind.network(cfg).state_dict()
    _check_tensors(path, {name: list(x.shape) for name, x in state.items()}, {name: list(x.shape) for name, x in known.items()})
    return cfg, state


def load_network(path: str | Path) -> Any:
    """The network of a folder of diffusers, in evaluation mode, in the dtype and memory format that its weights have there and its
    class here. Raises as ``read_folder``."""
    cfg, state = read_folder(path)
    kind, _ = _settings(Path(path))
    with torch.device("meta"):
        network = kind.network(cfg)
    lying = {name: torch.empty_like(x, device="cpu", dtype=state[name].dtype) for name, x in network.state_dict().items()}
    for name, tensor in lying.items():
        tensor.copy_(state.pop(name))
    network.load_state_dict(lying, assign=True)
    return network.eval()


def load_deferred(model: "Diffusion", path: str | Path, cut: Callable[["Diffusion"], Any]) -> "Diffusion":
    """``model``, which is built in ``nn.deferred_init``, cut by ``cut``, with weights that are read when they are made: those of
    its network from a folder of diffusers, or all from a file of ours or the folder of a run. Of transformers each process reads
    the part that it holds. Raises CheckpointError for weights that do not fit, before any is read."""
    path = Path(path)
    of_others = (path / CONFIG).is_file()
    known: Any = _settings(path)[1] if of_others else weights.read_settings(_resolve_run(path), "diffusion", DiffusionConfig)
    if known is None:
        raise CheckpointError(f"{path}: weights without settings; expected a file that hpcai has written")
    found = known if of_others else known.network
    if type(found) is not type(model.cfg.network):
        kinds = [type(one).__name__.removesuffix("Config") for one in (found, model.cfg.network)]
        raise CheckpointError(f"{path}: the weights are of a {kinds[0]}, the settings of model name a {kinds[1]}; change either")
    weights.check_sizes(path, found.model_dump(exclude=_RUN_SETTINGS), model.cfg.network.model_dump())
    if not of_others:
        cut(model)
        load_deferred(model, _resolve_run(path))
    elif isinstance(model.network, UNet):  # some files have its products as convolutions
        model.network = load_network(path).train()
        cut(model)
    else:
        cut(model)
        load_deferred(model.network, path / _INDEX if (path / _INDEX).exists() else path / FILE)
    return model


def save_folder(state: Mapping[str, Tensor], cfg: Settings, folder: str | Path, shard: int = _SHARD_BYTES) -> None:
    """Weights by name and settings as a folder that diffusers reads: config.json, and safetensors files of at most ``shard`` bytes,
    with their index where they are several. Raises CheckpointError for a network that diffusers has no class for."""
    kind, about = to_config(cfg)
    if kind is None:
        raise CheckpointError(f"{folder}: diffusers has no class for these settings of a {type(cfg).__name__}: {_unsupported_reason(cfg)}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_sharded(kind.to_names(state), folder, FILE, shard)
    (folder / CONFIG).write_text(json.dumps(about, indent=2) + "\n")


def _settings(folder: Path) -> tuple[DiffusersClass, Settings]:
    path = folder / CONFIG
    try:
        found = json.loads(path.read_text())
        found["_class_name"]
    except (OSError, ValueError, LookupError, TypeError) as problem:
        raise CheckpointError(f"{path}: no settings of a network: {problem!r}; expected JSON with a _class_name") from problem
    return from_config(found, path)


def from_config(found: Mapping[str, Any], path: Path) -> tuple[DiffusersClass, Settings]:
    """The class of a network and our settings of it from those of config.json at ``path``, which errors name."""
    name = found["_class_name"]
    if not isinstance(name, str) or name not in DIFFUSERS_CLASSES:
        raise ConfigError(f"{path}: _class_name is {name!r}; expected one of {', '.join(DIFFUSERS_CLASSES)}")
    try:
        return DIFFUSERS_CLASSES[name], DIFFUSERS_CLASSES[name].from_config(found, path)
    except KeyError as problem:
        raise CheckpointError(f"{path}: has no {problem}") from problem
    except (ConfigError, CheckpointError):
        raise
    except (TypeError, ValueError) as problem:
        raise ConfigError(f"{path}: {problem}") from problem


def to_config(cfg: Settings) -> tuple[DiffusersClass | None, dict[str, Any]]:
    """And back; None where diffusers has no class for it."""
    found = ((kind, about) for kind in DIFFUSERS_CLASSES.values() if (about := kind.to_config(cfg)) is not None)
    return next(found, (None, {}))


def _check_tensors(path: Path, found: Mapping[str, list[int]], known: Mapping[str, list[int]]) -> None:
    where = path / (_INDEX if (path / _INDEX).exists() else FILE)
    missing, unknown = [name for name in known if name not in found], [name for name in found if name not in known]
    if missing or unknown:
        said = [f"has no {_summarize(missing)}"] if missing else []
        said += [f"has {_summarize(unknown)}, for which the settings have no place"] if unknown else []
        raise CheckpointError(f"{where}: {', and '.join(said)}; is {CONFIG} that of these weights?")
    if other := next((name for name in known if found[name] != known[name]), None):
        sizes = f"{other} is {found[other]}, the settings make it {known[other]}"
        raise CheckpointError(f"{where}: {sizes}; is {CONFIG} that of these weights?")


def _summarize(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} others" if names[1:] else "")


def reject_unsupported(found: Mapping[str, Any], path: Path, known: Mapping[str, Any], read: Sequence[str]) -> None:
    """Raises ConfigError for settings of config.json at ``path`` that are neither ``read`` nor as ``known``, the only value that
    the network honours; one that nobody knows must be off."""
    for name, value in found.items():
        if name.startswith("_") or name in read or name in _IGNORED or not (value or name in known):
            continue
        only = known.get(name)
        if value != only and not (isinstance(value, list) and value and all(one == only for one in value)):
            raise ConfigError(f"{path}: {name} is {json.dumps(value)}; networks here know {json.dumps(only)} alone")


def _from_diffusers(found: Mapping[str, Any], path: Path, names: SettingNames, known: Mapping[str, Any], *read: str) -> dict[str, Any]:
    """Our settings from those of config.json by ``names``. Raises as ``honour``."""
    reject_unsupported(found, path, known, (*names, *read))
    words = {own: found[name] if default is ... else found.get(name, default) for name, (own, default) in names.items()}
    return {own: tuple(x) if isinstance(x, list) else x for own, x in words.items()}


def _to_diffusers(kind: str, cfg: Any, names: SettingNames, known: Mapping[str, Any]) -> dict[str, Any]:
    """And back."""
    found = {name: getattr(cfg, own) for name, (own, _) in names.items()}
    found = {name: list(x) if isinstance(x, tuple) else x for name, x in found.items()}
    return {"_class_name": kind, "_diffusers_version": _VERSION} | found | dict(known)


def _check_levels(found: Mapping[str, Any], path: Path, names: Sequence[str], levels: int) -> None:
    for name in names:
        if isinstance(found.get(name), list) and len(found[name]) != levels:
            said = f"{name} has {len(found[name])} values, block_out_channels {levels}"
            raise ConfigError(f"{path}: {said}; expected one for each level")


def _check_divides(path: Path, channels: Sequence[int], name: str, parts: Sequence[Any]) -> None:
    for width, part in zip(channels, parts):
        if not isinstance(part, int) or part < 1 or width % part:
            raise ConfigError(f"{path}: {name} is {part}, which does not divide {width}, of block_out_channels {list(channels)}")


# ---- U-Nets

_UNET_FIXED = {
    "act_fn": "silu", "center_input_sample": False, "downsample_padding": 1, "flip_sin_to_cos": True, "freq_shift": 0,
    "mid_block_scale_factor": 1, "resnet_time_scale_shift": "default", "time_embedding_type": "positional",
}  # fmt: skip
_UNET_CONDITION_FIXED = _UNET_FIXED | {
    "attention_type": "default", "class_embeddings_concat": False, "conv_in_kernel": 3, "conv_out_kernel": 3,
    "dual_cross_attention": False, "mid_block_type": "UNetMidBlock2DCrossAttn", "only_cross_attention": False,
    "resnet_out_scale_factor": 1.0, "resnet_skip_time_act": False, "transformer_layers_per_block": 1,
}  # fmt: skip
_UNET_2D_FIXED = _UNET_FIXED | {
    "add_attention": True, "downsample_type": "conv", "mid_block_type": "UNetMidBlock2D", "upsample_type": "conv",
}  # fmt: skip
_UNET_READ = (
    "attention_head_dim", "block_out_channels", "down_block_types", "dropout", "field_channels", "in_channels", "layers_per_block",
    "norm_eps", "norm_num_groups", "num_class_embeds", "out_channels", "up_block_types",
)  # fmt: skip
_BLOCKS = {"cross": "CrossAttn{}Block2D", "self": "Attn{}Block2D", "none": "{}Block2D"}


def _read_unet(found: Mapping[str, Any], path: Path, kind: str) -> dict[str, Any]:
    """What both classes of U-Nets say alike."""
    channels = tuple(found["block_out_channels"])
    down, up = found["down_block_types"], found["up_block_types"]
    _check_levels(found, path, ("down_block_types", "up_block_types", "attention_head_dim", "layers_per_block"), len(channels))
    words = {_BLOCKS[one].format("Down"): one for one in (kind, "none")}
    if other := next((name for name in down if name not in words), None):
        raise ConfigError(f"{path}: down_block_types has {other!r}; expected some of {', '.join(words)}")
    if list(up) != [name.replace("Down", "Up") for name in reversed(down)]:
        raise ConfigError(f"{path}: up_block_types is {up}; expected those of {down} the other way round")
    groups = found.get("norm_num_groups", 32)
    _check_divides(path, channels, "norm_num_groups", [groups] * len(channels))
    blocks, field = found.get("layers_per_block", 2), found.get("field_channels", 0)
    if isinstance(blocks, list):
        if len(set(blocks)) > 1:
            raise ConfigError(f"{path}: layers_per_block is {blocks}; expected one number for all levels")
        blocks = blocks[0]
    return {
        "inputs": found["in_channels"] - field, "field": field, "outputs": found["out_channels"], "channels": channels,
        "blocks": blocks, "attention": tuple(words[name] for name in down), "middle": kind,
        "classes": found.get("num_class_embeds"), "groups": groups, "eps": found.get("norm_eps", 1e-5),
        "dropout": found.get("dropout", 0.0),
    }  # fmt: skip


def _from_unet_condition(found: Mapping[str, Any], path: Path) -> UNetConfig:
    reject_unsupported(found, path, _UNET_CONDITION_FIXED, (*_UNET_READ, "cross_attention_dim", "use_linear_projection"))
    same, tokens = _read_unet(found, path, "cross"), found.get("cross_attention_dim", 1280)
    levels = len(same["channels"])
    _check_levels(found, path, ("cross_attention_dim",), levels)
    if isinstance(tokens, list):
        if len(set(tokens)) > 1:
            raise ConfigError(f"{path}: cross_attention_dim is {tokens}; expected one number for all levels")
        tokens = tokens[0]
    heads = found.get("attention_head_dim", 8)  # which is a number of heads in this class
    heads = tuple(heads) if isinstance(heads, list) else (heads,) * levels
    _check_divides(path, same["channels"], "attention_head_dim", heads)
    return UNetConfig(**same, heads=heads, tokens=tokens)


def _from_unet_2d(found: Mapping[str, Any], path: Path) -> UNetConfig:
    reject_unsupported(found, path, _UNET_2D_FIXED | {"attn_norm_num_groups": None}, (*_UNET_READ, "add_attention"))
    same, size = _read_unet(found, path, "self"), found.get("attention_head_dim", 8)
    channels = same["channels"]
    if not found.get("add_attention", True):
        same["middle"] = "none"
    kinds = (*same["attention"], same["middle"])
    heads = [1] * len(channels)
    for level, kind in zip((*range(len(channels)), -1), kinds):
        if kind == "self" and size is not None:
            _check_divides(path, channels[level:][:1], "attention_head_dim", [size])
            heads[level] = channels[level] // size
    return UNetConfig(**same, heads=tuple(heads), tokens=None)


def _write_unet(cfg: UNetConfig) -> dict[str, Any]:
    """What is written of both classes, and diffusers' words for all that is always so."""
    blocks = [_BLOCKS[one].format("Down") for one in cfg.attention]
    return {
        "_diffusers_version": _VERSION, "sample_size": None, "in_channels": cfg.inputs + cfg.field, "out_channels": cfg.outputs,
        "block_out_channels": list(cfg.channels), "layers_per_block": cfg.blocks, "down_block_types": blocks,
        "up_block_types": [name.replace("Down", "Up") for name in reversed(blocks)], "num_class_embeds": cfg.classes,
        "norm_num_groups": cfg.groups, "norm_eps": cfg.eps, "dropout": cfg.dropout,
    } | ({"field_channels": cfg.field} if cfg.field else {})  # fmt: skip


def _to_unet_condition(cfg: Any) -> dict[str, Any] | None:
    if not isinstance(cfg, UNetConfig) or cfg.middle != "cross" or _unsupported_reason(cfg):
        return None
    own = {"_class_name": "UNet2DConditionModel", "attention_head_dim": list(cfg.heads), "cross_attention_dim": cfg.tokens}
    return own | _write_unet(cfg) | _UNET_CONDITION_FIXED | {"use_linear_projection": True}


def _to_unet_2d(cfg: Any) -> dict[str, Any] | None:
    if not isinstance(cfg, UNetConfig) or cfg.middle == "cross" or _unsupported_reason(cfg):
        return None
    sizes = _head_sizes(cfg)
    own = {"_class_name": "UNet2DModel", "attention_head_dim": next(iter(sizes), 8)}
    return own | _write_unet(cfg) | _UNET_2D_FIXED | {"add_attention": cfg.middle == "self"}


def _head_sizes(cfg: UNetConfig) -> set[int]:
    """Channels of a head, where there is attention."""
    each = zip((*cfg.channels, cfg.channels[-1]), (*cfg.heads, cfg.heads[-1]), (*cfg.attention, cfg.middle))
    return {width // heads for width, heads, kind in each if kind != "none"}


def _unsupported_reason(cfg: Any) -> str:
    """Why diffusers has no class for a network."""
    if not isinstance(cfg, UNetConfig):
        return f"theta {cfg.theta:g}" if isinstance(cfg, FluxConfig) else "it is of another kind"
    kinds = {*cfg.attention, cfg.middle} - {"none"}
    if len(kinds) > 1 or ("cross" in kinds and cfg.middle != "cross"):
        return f"attention {list(cfg.attention)} with {cfg.middle} in the middle"
    if kinds == {"self"} and len(_head_sizes(cfg)) > 1:
        return f"heads {list(cfg.heads)}, which have other numbers of channels at other levels"
    if cfg.attention_groups not in (None, cfg.groups) and kinds:
        return f"attention_groups {cfg.attention_groups} beside groups {cfg.groups}"
    if cfg.dims != 2 or cfg.patch != 1:
        return f"dims {cfg.dims}, patch {cfg.patch}"
    return "parameters" if cfg.parameters else "periodic" if any(cfg.periodic) else ""


def _flatten_projections(state: State) -> State:
    """Layers before and after transformers as matrices: some files have them as convolutions of 1 x 1."""
    ends = (".proj_in.weight", ".proj_out.weight")
    return {name: x.flatten(1) if name.endswith(ends) and x.shape[2:].numel() == 1 else x for name, x in state.items()}


# ---- autoencoders

_VAE: SettingNames = {
    "in_channels": ("inputs", ...), "out_channels": ("outputs", ...), "latent_channels": ("latents", ...),
    "block_out_channels": ("channels", ...), "layers_per_block": ("blocks", 1), "norm_num_groups": ("groups", 32),
    "use_quant_conv": ("quantised", True), "scaling_factor": ("scale", 0.18215), "mid_block_add_attention": ("attention", True),
    "shift_factor": ("shift", None),
}  # fmt: skip
_VAE_FIXED = {"act_fn": "silu", "down_block_types": "DownEncoderBlock2D", "up_block_types": "UpDecoderBlock2D"}


def _from_vae(found: Mapping[str, Any], path: Path) -> VAEConfig:
    words = _from_diffusers(found, path, _VAE, _VAE_FIXED, "use_post_quant_conv")
    _check_levels(found, path, ("down_block_types", "up_block_types"), len(words["channels"]))
    if found.get("use_post_quant_conv", True) != words["quantised"]:
        raise ConfigError(f"{path}: use_post_quant_conv is {json.dumps(not words['quantised'])}; expected that of use_quant_conv")
    _check_divides(path, words["channels"], "norm_num_groups", [words["groups"]] * len(words["channels"]))
    return VAEConfig(**words | {"shift": words["shift"] or 0.0})


def _to_vae(cfg: Any) -> dict[str, Any] | None:
    if not isinstance(cfg, VAEConfig):
        return None
    about = _to_diffusers("AutoencoderKL", cfg, _VAE, _VAE_FIXED)
    blocks = {name: [_VAE_FIXED[name]] * len(cfg.channels) for name in ("down_block_types", "up_block_types")}
    return about | blocks | {"shift_factor": cfg.shift or None, "use_post_quant_conv": cfg.quantised}


def _update_names(state: State) -> State:
    """Attention by its newer names, as matrices."""
    found: State = {}
    for name, tensor in state.items():
        if old := _LEGACY_ATTENTION.fullmatch(name):
            before, part, kind = old.groups()
            name = f"{before}.{_LEGACY_NAMES[part]}.{kind}"
        is_matrix = re.fullmatch(r".*\.attentions\.\d+\.to_(q|k|v|out\.0)\.weight", name) is not None
        found[name] = tensor.flatten(1) if is_matrix else tensor
    return found


# ---- networks of tokens


_DIT: SettingNames = {
    "num_attention_heads": ("heads", 16), "attention_head_dim": ("head", 72), "in_channels": ("inputs", 4),
    "out_channels": ("outputs", None), "num_layers": ("layers", 28), "sample_size": ("size", 32), "patch_size": ("patch", 2),
    "num_embeds_ada_norm": ("classes", 1000),
}  # fmt: skip
_DIT_FIXED = {
    "dropout": 0.0, "attention_bias": True, "activation_fn": "gelu-approximate", "upcast_attention": False,
    "norm_type": "ada_norm_zero", "norm_elementwise_affine": False, "norm_eps": 1e-5,
}  # fmt: skip
_LEGACY_DEFAULTS = {  # what is meant in older files where they do not say: a network of another kind
    "attention_bias": False, "activation_fn": "geglu", "norm_type": "layer_norm", "norm_elementwise_affine": True,
    "sample_size": None, "patch_size": None, "num_embeds_ada_norm": None,
}  # fmt: skip
_FLUX: SettingNames = {
    "in_channels": ("inputs", 64), "num_layers": ("double", 19), "num_single_layers": ("single", 38),
    "attention_head_dim": ("head", 128), "num_attention_heads": ("heads", 24), "joint_attention_dim": ("tokens", 4096),
    "pooled_projection_dim": ("pooled", 768), "guidance_embeds": ("guidance", False), "axes_dims_rope": ("turned", (16, 56, 56)),
}  # fmt: skip


def _from_dit(found: Mapping[str, Any], path: Path) -> DiTConfig:
    words = _from_diffusers(found, path, _DIT, _DIT_FIXED, "norm_num_groups")
    return DiTConfig(**words | {"outputs": words["outputs"] or words["inputs"]})


def _from_transformer_2d(found: Mapping[str, Any], path: Path) -> DiTConfig:
    return _from_dit({**_LEGACY_DEFAULTS, **found}, path)


def _from_flux(found: Mapping[str, Any], path: Path) -> FluxConfig:
    inputs = found.get("in_channels", 64)
    outputs = inputs if found.get("out_channels") == inputs else None
    return FluxConfig(**_from_diffusers(found, path, _FLUX, {"patch_size": 1, "out_channels": outputs}))


def _to_dit(cfg: Any) -> dict[str, Any] | None:
    return _to_diffusers("DiTTransformer2DModel", cfg, _DIT, _DIT_FIXED) if isinstance(cfg, DiTConfig) else None


def _to_flux(cfg: Any) -> dict[str, Any] | None:
    if not isinstance(cfg, FluxConfig) or cfg.theta != 10_000.0:
        return None
    return _to_diffusers("FluxTransformer2DModel", cfg, _FLUX, {"patch_size": 1, "out_channels": None})


DIFFUSERS_CLASSES: dict[str, DiffusersClass] = {
    "UNet2DConditionModel": DiffusersClass(UNet, _from_unet_condition, _to_unet_condition, _flatten_projections),
    "UNet2DModel": DiffusersClass(UNet, _from_unet_2d, _to_unet_2d, dict),
    "AutoencoderKL": DiffusersClass(VAE, _from_vae, _to_vae, _update_names),
    "DiTTransformer2DModel": DiffusersClass(DiT, _from_dit, _to_dit, dict),
    "Transformer2DModel": DiffusersClass(DiT, _from_transformer_2d, lambda cfg: None, dict),  # DiT in older files
    "FluxTransformer2DModel": DiffusersClass(Flux, _from_flux, _to_flux, dict),
}


def load_weights(path: str | Path, cfg: DiffusionConfig | None = None) -> Any:
    """A ``Diffusion`` in evaluation mode from a file of ours, or from the folder of a run, which holds one; ``cfg`` must agree with
    the settings in it where it is given. Raises CheckpointError for weights that are damaged, not finite or without settings."""
    from hpcai.models.diffusion.model import Diffusion

    path = _resolve_run(path)
    state, found = weights.load_state(path, "diffusion", DiffusionConfig)
    if found is None:
        raise CheckpointError(f"{path}: weights without settings; expected a file that hpcai has written")
    if bad := next((name for name, tensor in state.items() if not tensor.isfinite().all()), None):
        raise CheckpointError(f"{path}: {bad} has numbers that are not finite; fetch or save it again")
    if cfg is not None:
        weights.check_sizes(path, found.model_dump(exclude={"sampler", "unconditional", "objective"}), cfg.model_dump())
    return weights.load_into(Diffusion(cfg or found), state, path)


def _resolve_run(path: str | Path) -> Path:
    """That of a run's folder, or the path itself."""
    return Path(path) / "model.safetensors" if Path(path).is_dir() else Path(path)
