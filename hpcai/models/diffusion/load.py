"""Read and write networks as folders of diffusers: config.json and safetensors files."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from hpcai.config import Settings
from hpcai.errors import CheckpointError, ConfigError
from hpcai.json_file import check_fields, read_object
from hpcai.models.diffusion.config import DiffusionConfig, DiTConfig, FluxConfig, SD3Config, UNetConfig, VAEConfig
from hpcai.models.diffusion.dit import DiT
from hpcai.models.diffusion.flux import Flux
from hpcai.models.diffusion.sd3 import SD3
from hpcai.models.diffusion.unet import UNet
from hpcai.models.diffusion.vae import VAE
from hpcai.nn import weights
from hpcai.nn.deferred_init import read_on_materialize
from hpcai.nn.safetensors_files import find_weights, open_tensors, read_full, save_sharded

if TYPE_CHECKING:
    from hpcai.models.diffusion.model import Diffusion

CONFIG, FILE = "config.json", "diffusion_pytorch_model.safetensors"
_STEM = FILE.partition(".")[0]
_SHARD_BYTES = 10_000_000_000
_RUN_SETTINGS = {"dropout", "recompute", "zero"}  # settings of a run, which may differ from those of its initial weights
_VERSION = "0.42.1"  # of diffusers
_LEGACY_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}  # in older autoencoders
_LEGACY_ATTENTION = re.compile(r"(.*\.attentions\.\d+)\.(query|key|value|proj_attn)\.(weight|bias)")
_MATRICES = tuple(f".{name}.weight" for name in ("proj_in", "proj_out", "to_q", "to_k", "to_v", "to_out.0"))
_IGNORED = {"sample_size", "force_upcast", "upcast_attention", "addition_embed_type_num_heads"}

State = dict[str, Tensor]
NameMap = Mapping[str, Sequence[Any]]  # name in diffusers -> our name, and the default of one that is not required
TABLES: dict[str, Any] = json.loads(Path(__file__).with_name("diffusers.json").read_text(encoding="utf-8"))
"""names of settings, fixed values of those that our networks do not have, and the settings of U-Nets that are read"""
_UNET_FIXED = {name: TABLES["unet fixed"] | TABLES[f"{name} fixed"] for name in ("UNet2DConditionModel", "UNet2DModel")}
_UNET, _UNET_READ, _BLOCKS = (TABLES[f"unet {name}"] for name in ("names", "read", "blocks"))
_UNET_CONDITION_READ, _TEXT_TIME = TABLES["UNet2DConditionModel read"], TABLES["UNet2DConditionModel texts and sizes"]
_VAE, _VAE_FIXED, _DIT, _DIT_FIXED = (TABLES[name] for name in ("vae names", "vae fixed", "dit names", "dit fixed"))


class DiffusersClass(NamedTuple):
    """The conversion of a class of diffusers."""

    network: Callable[[Any], nn.Module]
    """constructor of our network from its settings"""
    from_config: Callable[[Mapping[str, Any], Path], Settings]
    """config.json -> settings; the path is for errors. Raises ConfigError for options that our network does not support."""
    to_config: Callable[[Any], dict[str, Any] | None]
    """settings -> config.json, or None if they do not belong to this class"""


def read_folder(path: str | Path) -> tuple[Settings, State]:
    """Read settings and weights, by our names, from a folder of diffusers. Raises CheckpointError for weights that are missing,
    unexpected, damaged, not finite, not floating point, or of other shapes; ConfigError for an unsupported class or setting."""
    path = Path(path)
    kind, cfg = _settings(path)
    file, tensors = _find_weights(path), State()
    for name, lazy in open_tensors(file).items():
        tensor = read_full(lazy)
        if not tensor.is_floating_point():
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(f"{lazy.path}: {name} holds {dtype}; expected floating-point numbers: fetch or save it again")
        tensors[name] = tensor
    state = _update_names(tensors)
    weights.check_claims(path / CONFIG, cfg, {name: x.shape for name, x in state.items()})
    with torch.device("meta"):
        expected = kind.network(cfg).state_dict()
    missing, unknown = [name for name in expected if name not in state], [name for name in state if name not in expected]
    if missing or unknown:
        errors = [f"has no {_summarize(missing)}"] if missing else []
        errors += [f"has {_summarize(unknown)}, which no module of the settings has"] if unknown else []
        raise CheckpointError(f"{file}: {', and '.join(errors)}; is {CONFIG} that of these weights?")
    if other := next((name for name, x in expected.items() if state[name].shape != x.shape), None):
        shapes = f"{other} is {list(state[other].shape)}, the settings make it {list(expected[other].shape)}"
        raise CheckpointError(f"{file}: {shapes}; is {CONFIG} that of these weights?")
    return cfg, state


def load_network(path: str | Path) -> Any:
    """Load the network of a folder of diffusers in evaluation mode, in the dtype of the files and the memory format of our class.
    Raises as ``read_folder``."""
    cfg, state = read_folder(path)
    kind, _ = _settings(Path(path))
    with torch.device("meta"):
        network = kind.network(cfg)
    for name, like in network.state_dict().items():
        state[name] = torch.empty_like(like, device="cpu", dtype=state[name].dtype).copy_(state[name])
    network.load_state_dict(state, assign=True)
    return network.eval()


def load_deferred(model: "Diffusion", path: str | Path, shard: Callable[["Diffusion"], Any]) -> "Diffusion":
    """Shard ``model``, built in ``nn.deferred_init``, by ``shard``, and read its weights when they are materialized: those of the
    network from a folder of diffusers, or all from a file of ours or the folder of a run. Each rank reads its shard of a
    transformer only. Raises CheckpointError for weights that do not fit, before any is read."""
    path = Path(path)
    is_diffusers = (path / CONFIG).is_file()
    settings: Any = _settings(path)[1] if is_diffusers else weights.read_settings(_resolve_run(path), "diffusion", DiffusionConfig)
    if settings is None:
        raise CheckpointError(f"{path}: weights without settings; expected a file that hpcai has written")
    cfg = settings if is_diffusers else settings.network
    if type(cfg) is not type(model.cfg.network):
        kinds = [type(network).__name__.removesuffix("Config") for network in (cfg, model.cfg.network)]
        raise CheckpointError(f"{path}: the weights are of a {kinds[0]}, the settings of model name a {kinds[1]}; change either")
    weights.check_sizes(path, cfg.model_dump(exclude=_RUN_SETTINGS), model.cfg.network.model_dump())
    if not is_diffusers:
        shard(model)
        read_on_materialize(model, _resolve_run(path))
    elif isinstance(model.network, UNet):  # some files have convolutions in place of its matrices
        model.network = load_network(path).train().to(next(model.parameters()).dtype)
        shard(model)
    else:
        shard(model)
        read_on_materialize(model.network, _find_weights(path))
    return model


def save_folder(state: Mapping[str, Tensor], cfg: Settings, folder: str | Path, shard: int = _SHARD_BYTES) -> None:
    """Write weights and settings as a folder of diffusers: config.json, and safetensors files of at most ``shard`` bytes, with an
    index if there are several. Raises CheckpointError for settings without a class in diffusers."""
    if (config := to_config(cfg)) is None:
        raise CheckpointError(f"{folder}: diffusers has no class for these settings of a {type(cfg).__name__}: {_reason(cfg)}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_sharded(dict(state), folder, FILE, shard)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _update_names(state: State) -> State:
    """Convert names of attention weights in older files, and 1 x 1 convolutions in place of its matrices and projections."""
    updated: State = {}
    for name, tensor in state.items():
        if match := _LEGACY_ATTENTION.fullmatch(name):
            prefix, old, kind = match.groups()
            name = f"{prefix}.{_LEGACY_NAMES[old]}.{kind}"
        is_convolution = name.endswith(_MATRICES) and tensor.ndim > 2 and tensor.shape[2:].numel() == 1
        updated[name] = tensor.flatten(1) if is_convolution else tensor
    return updated


def _find_weights(folder: Path) -> Path:
    """Return the index of the weights in a folder of diffusers, or their file. Raises CheckpointError if there is neither."""
    if (path := find_weights(folder, _STEM)) is not None:
        return path
    if (pickled := find_weights(folder, _STEM, "bin")) is not None:
        where, variant = repr(str(folder)), ", variant='fp16'" * (".fp16." in pickled.name)
        convert = f"import diffusers; diffusers.AutoModel.from_pretrained({where}{variant}).save_pretrained({where})"
        raise CheckpointError(f'{pickled}: a pickle; only safetensors files are read: convert it by python -c "{convert}"')
    raise CheckpointError(f"{folder / FILE}: does not exist; fetch or save the folder again")


def _settings(folder: Path) -> tuple[DiffusersClass, Settings]:
    path = folder / CONFIG
    return from_config(read_object(path, "the settings of a network of diffusers, with a _class_name"), path)


def from_config(config: Mapping[str, Any], path: Path) -> tuple[DiffusersClass, Settings]:
    """Return the class and the settings of a config.json; ``path`` is for errors."""
    name = config.get("_class_name")
    if not isinstance(name, str) or name not in DIFFUSERS_CLASSES:
        raise ConfigError(f"{path}: _class_name is {name!r}; expected one of {', '.join(DIFFUSERS_CLASSES)}")
    with check_fields(path, f"the settings of a {name}"):
        return DIFFUSERS_CLASSES[name], DIFFUSERS_CLASSES[name].from_config(config, path)


def to_config(cfg: Settings) -> dict[str, Any] | None:
    """Return config.json of settings, or None if diffusers has no class for them."""
    return next((config for kind in DIFFUSERS_CLASSES.values() if (config := kind.to_config(cfg)) is not None), None)


def _summarize(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} others" if names[1:] else "")


def reject_unsupported(config: Mapping[str, Any], path: Path, fixed: Mapping[str, Any], read: Sequence[str]) -> None:
    """Raise ConfigError for settings of config.json that are not ``read`` and have another value than ``fixed``, the only one that
    the network supports. Unknown settings must be off."""
    for name, value in config.items():
        if name.startswith("_") or name in read or name in _IGNORED or not (value or name in fixed):
            continue
        only = fixed.get(name)
        if value != only and not (isinstance(value, list) and value and all(item == only for item in value)):
            raise ConfigError(f"{path}: {name} is {json.dumps(value)}; networks here support {json.dumps(only)} only")


def _from_diffusers(config: Mapping[str, Any], path: Path, names: NameMap, fixed: Mapping[str, Any], *read: str) -> dict[str, Any]:
    """Return our settings of a config.json, renamed by ``names``. Raises as ``reject_unsupported``."""
    reject_unsupported(config, path, fixed, (*names, *read))
    values = {ours: config.get(name, *default) if default else config[name] for name, (ours, *default) in names.items()}
    return {ours: tuple(x) if isinstance(x, list) else x for ours, x in values.items()}


def _to_diffusers(kind: str, cfg: Any, names: NameMap, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of settings, the inverse of ``_from_diffusers``."""
    config = {name: getattr(cfg, ours) for name, (ours, *_) in names.items()}
    config = {name: list(x) if isinstance(x, tuple) else x for name, x in config.items()}
    return {"_class_name": kind, "_diffusers_version": _VERSION} | config | dict(fixed)


def _check_levels(config: Mapping[str, Any], path: Path, names: Sequence[str], levels: int) -> None:
    for name in names:
        if isinstance(config.get(name), list) and len(config[name]) != levels:
            error = f"{name} has {len(config[name])} values, block_out_channels {levels}"
            raise ConfigError(f"{path}: {error}; expected one for each level")


def _single(config: Mapping[str, Any], path: Path, name: str, default: int) -> Any:
    """Return a setting that may be a list with one number for each level."""
    value = config.get(name, default)
    if isinstance(value, list) and len(set(value)) > 1:
        raise ConfigError(f"{path}: {name} is {value}; expected one number for all levels")
    return value[0] if isinstance(value, list) else value


def _check_divides(path: Path, channels: Sequence[int], name: str, divisors: Sequence[Any]) -> None:
    for width, divisor in zip(channels, divisors):
        if not isinstance(divisor, int) or divisor < 1 or width % divisor:
            raise ConfigError(f"{path}: {name} is {divisor}, which does not divide {width}, of block_out_channels {list(channels)}")


def _read_unet(config: Mapping[str, Any], path: Path, kind: str, fixed: Mapping[str, Any], *read: str) -> dict[str, Any]:
    """Return the settings that both classes of U-Nets have in common. Raises as ``reject_unsupported``."""
    common = _from_diffusers(config, path, _UNET, fixed, *_UNET_READ, *read)
    channels, field = common["channels"], config.get("field_channels", 0)
    down, up = config["down_block_types"], config["up_block_types"]
    _check_levels(config, path, ("down_block_types", "up_block_types", "attention_head_dim", "layers_per_block"), len(channels))
    kinds = {_BLOCKS[attention].format("Down"): attention for attention in (kind, "none")}
    if other := next((name for name in down if name not in kinds), None):
        raise ConfigError(f"{path}: down_block_types has {other!r}; expected some of {', '.join(kinds)}")
    if list(up) != [name.replace("Down", "Up") for name in reversed(down)]:
        raise ConfigError(f"{path}: up_block_types is {up}; expected those of {down} in reverse order")
    _check_divides(path, channels, "norm_num_groups", [common["groups"]] * len(channels))
    return common | {
        "inputs": common["inputs"] - field, "field": field, "blocks": _single(config, path, "layers_per_block", 2),
        "attention": tuple(kinds[name] for name in down), "middle": kind,
    }  # fmt: skip


def _from_unet_condition(config: Mapping[str, Any], path: Path) -> UNetConfig:
    fixed = _UNET_FIXED["UNet2DConditionModel"] | (_TEXT_TIME if config.get("addition_embed_type") else {})
    common = _read_unet(config, path, "cross", fixed, *_UNET_CONDITION_READ)
    levels = len(common["channels"])
    _check_levels(config, path, ("cross_attention_dim", "transformer_layers_per_block"), levels)
    tokens, layers = _single(config, path, "cross_attention_dim", 1280), config.get("transformer_layers_per_block", 1)
    layers = tuple(layers) if isinstance(layers, list) else (layers,) * levels
    common["transformer_layers"] = () if all(n == 1 for n in layers) else layers
    if config.get("addition_embed_type"):
        sizes, total = config["addition_time_embed_dim"], config["projection_class_embeddings_input_dim"]
        if total - 5 * sizes == tokens:  # of one encoder: the refiner's
            error = f"projection_class_embeddings_input_dim is {total}, {tokens} of a text and {sizes} of five numbers"
            raise ConfigError(f"{path}: {error}, a refiner's; networks here take the base's six sizes: name the folder of the base")
        common |= {"pooled": total - 6 * sizes, "sizes": sizes}
    heads = config.get("attention_head_dim", 8)  # the number of heads, in this class
    heads = tuple(heads) if isinstance(heads, list) else (heads,) * levels
    _check_divides(path, common["channels"], "attention_head_dim", heads)
    return UNetConfig(**common, heads=heads, tokens=tokens)


def _from_unet_2d(config: Mapping[str, Any], path: Path) -> UNetConfig:
    common = _read_unet(config, path, "self", _UNET_FIXED["UNet2DModel"] | {"attn_norm_num_groups": None}, "add_attention")
    size = config.get("attention_head_dim", 8)
    channels = common["channels"]
    if not config.get("add_attention", True):
        common["middle"] = "none"
    kinds = (*common["attention"], common["middle"])
    heads = [1] * len(channels)
    for level, kind in zip((*range(len(channels)), -1), kinds):
        if kind == "self" and size is not None:
            _check_divides(path, channels[level:][:1], "attention_head_dim", [size])
            heads[level] = channels[level] // size
    return UNetConfig(**common, heads=tuple(heads), tokens=None)


def _to_unet(kind: str, cfg: Any) -> dict[str, Any] | None:
    is_conditional = kind == "UNet2DConditionModel"
    if not isinstance(cfg, UNetConfig) or is_conditional != (cfg.middle == "cross") or _reason(cfg):
        return None
    blocks = [_BLOCKS[attention].format("Down") for attention in cfg.attention]
    up = [name.replace("Down", "Up") for name in reversed(blocks)]
    own = {"sample_size": None, "in_channels": cfg.inputs + cfg.field, "down_block_types": blocks, "up_block_types": up}
    if cfg.field:
        own["field_channels"] = cfg.field
    if is_conditional:
        own |= {"attention_head_dim": list(cfg.heads), "cross_attention_dim": cfg.tokens, "use_linear_projection": True}
        own["transformer_layers_per_block"] = list(cfg.transformer_layers) or 1
        if cfg.pooled and cfg.sizes:
            total = cfg.pooled + 6 * cfg.sizes
            own |= _TEXT_TIME | {"addition_time_embed_dim": cfg.sizes, "projection_class_embeddings_input_dim": total}
    else:
        own |= {"attention_head_dim": next(iter(_head_sizes(cfg)), 8), "add_attention": cfg.middle == "self"}
    return _to_diffusers(kind, cfg, _UNET, _UNET_FIXED[kind]) | own


def _head_sizes(cfg: UNetConfig) -> set[int]:
    levels = zip((*cfg.channels, cfg.channels[-1]), (*cfg.heads, cfg.heads[-1]), (*cfg.attention, cfg.middle))
    return {width // heads for width, heads, kind in levels if kind != "none"}


def _reason(cfg: Any) -> str:
    """Return the reason that diffusers has no class for a network, or an empty string."""
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
    return "parameters" if cfg.parameters else "fine" if cfg.fine else "periodic" if any(cfg.periodic) else ""


def _from_vae(config: Mapping[str, Any], path: Path) -> VAEConfig:
    cfg = _from_diffusers(config, path, _VAE, _VAE_FIXED, "use_post_quant_conv")
    _check_levels(config, path, ("down_block_types", "up_block_types"), len(cfg["channels"]))
    if config.get("use_post_quant_conv", True) != cfg["quantised"]:
        raise ConfigError(f"{path}: use_post_quant_conv is {json.dumps(not cfg['quantised'])}; expected that of use_quant_conv")
    _check_divides(path, cfg["channels"], "norm_num_groups", [cfg["groups"]] * len(cfg["channels"]))
    return VAEConfig(**cfg | {"shift": cfg["shift"] or 0.0})


def _to_vae(cfg: Any) -> dict[str, Any] | None:
    if not isinstance(cfg, VAEConfig):
        return None
    config = _to_diffusers("AutoencoderKL", cfg, _VAE, _VAE_FIXED)
    blocks = {name: [_VAE_FIXED[name]] * len(cfg.channels) for name in ("down_block_types", "up_block_types")}
    return config | blocks | {"shift_factor": cfg.shift or None, "use_post_quant_conv": cfg.quantised}


def _from_dit(config: Mapping[str, Any], path: Path, defaults: Mapping[str, Any] = {}) -> DiTConfig:
    cfg = _from_diffusers({**defaults, **config}, path, _DIT, defaults | _DIT_FIXED, "norm_num_groups")
    return DiTConfig(**cfg | {"outputs": cfg["outputs"] or cfg["inputs"]})


def _from_flux(config: Mapping[str, Any], path: Path) -> FluxConfig:
    inputs = config.get("in_channels", 64)
    outputs = inputs if config.get("out_channels") == inputs else None
    return FluxConfig(**_from_diffusers(config, path, TABLES["flux names"], {"patch_size": 1, "out_channels": outputs}))


def _from_sd3(config: Mapping[str, Any], path: Path) -> SD3Config:
    width = config.get("num_attention_heads", 18) * config.get("attention_head_dim", 64)
    cfg = _from_diffusers({"caption_projection_dim": 1152, **config}, path, TABLES["sd3 names"], {"caption_projection_dim": width})
    return SD3Config(**cfg | {"outputs": cfg["outputs"] or cfg["inputs"]})


def _to_dit(cfg: Any) -> dict[str, Any] | None:
    return _to_diffusers("DiTTransformer2DModel", cfg, _DIT, _DIT_FIXED) if isinstance(cfg, DiTConfig) else None


def _to_flux(cfg: Any) -> dict[str, Any] | None:
    if not isinstance(cfg, FluxConfig) or cfg.theta != 10_000.0:
        return None
    return _to_diffusers("FluxTransformer2DModel", cfg, TABLES["flux names"], {"patch_size": 1, "out_channels": None})


def _to_sd3(cfg: Any) -> dict[str, Any] | None:
    fixed = {"caption_projection_dim": getattr(cfg, "width", None)}
    return _to_diffusers("SD3Transformer2DModel", cfg, TABLES["sd3 names"], fixed) if isinstance(cfg, SD3Config) else None


DIFFUSERS_CLASSES: dict[str, DiffusersClass] = {
    "UNet2DConditionModel": DiffusersClass(UNet, _from_unet_condition, partial(_to_unet, "UNet2DConditionModel")),
    "UNet2DModel": DiffusersClass(UNet, _from_unet_2d, partial(_to_unet, "UNet2DModel")),
    "AutoencoderKL": DiffusersClass(VAE, _from_vae, _to_vae),
    "DiTTransformer2DModel": DiffusersClass(DiT, _from_dit, _to_dit),
    "Transformer2DModel": DiffusersClass(  # DiT in older files, whose defaults are not those of a DiT
        DiT, partial(_from_dit, defaults=TABLES["Transformer2DModel defaults"]), lambda cfg: None
    ),
    "FluxTransformer2DModel": DiffusersClass(Flux, _from_flux, _to_flux),
    "SD3Transformer2DModel": DiffusersClass(SD3, _from_sd3, _to_sd3),
}


def load_weights(path: str | Path, cfg: DiffusionConfig | None = None) -> Any:
    """Load a ``Diffusion`` in evaluation mode from a file of ours, or the folder of a run with such a file. ``cfg``, if given, must
    agree with its settings. Raises CheckpointError for weights that are damaged, not finite, or without settings."""
    from hpcai.models.diffusion.model import Diffusion

    path = _resolve_run(path)
    state, settings = weights.load_state(path, "diffusion", DiffusionConfig)
    if settings is None:
        raise CheckpointError(f"{path}: weights without settings; expected a file that hpcai has written")
    if bad := next((name for name, tensor in state.items() if not tensor.isfinite().all()), None):
        raise CheckpointError(f"{path}: {bad} has elements that are not finite; fetch or save it again")
    if cfg is not None:
        weights.check_sizes(path, settings.model_dump(exclude={"sampler", "unconditional", "objective"}), cfg.model_dump())
    return weights.load_into(Diffusion(cfg or settings), state, path)


def _resolve_run(path: str | Path) -> Path:
    """Return the weights file of a folder, or ``path`` itself."""
    return Path(path) / "model.safetensors" if Path(path).is_dir() else Path(path)
