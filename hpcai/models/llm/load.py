"""Read and write language models as folders of Hugging Face: config.json and safetensors files."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcai.errors import CheckpointError, ConfigError
from hpcai.json_file import check_fields, read_object
from hpcai.models.llm.config import LLMConfig
from hpcai.models.llm.model import LLM
from hpcai.nn import weights
from hpcai.nn.deferred_init import read_on_materialize
from hpcai.nn.safetensors_files import LazyTensor, open_tensors, save_sharded

_INDEX, _FILE, _CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
_IGNORED = re.compile(r".*rotary_emb\.inv_freq|.*\.attn\.(masked_)?bias")  # buffers in older files
_SHARD_BYTES = 5_000_000_000
_TABLES: dict[str, Any] = json.loads(Path(__file__).with_name("transformers.json").read_text(encoding="utf-8"))
_KEYS: dict[str, dict[str, str]] = _TABLES["keys"]  # settings, and their names in config.json
_DEFAULTS, _LLAMA3 = _TABLES["defaults"], _TABLES["llama3 scaling"]
_GPT2_EMBEDDINGS, _GPT2_LAYER = _TABLES["gpt2 embeddings"], _TABLES["gpt2 layer"]  # names of GPT-2's files, and ours


def load_weights(path: str | Path, cfg: LLMConfig | None = None) -> LLM:
    """Load a model in evaluation mode from a Llama or GPT-2 folder of Hugging Face, a safetensors file of ours, or the folder of a
    run with such a file.

    The settings are those of the folder or file; ``cfg``, if given, must agree with them. A tokenizer in the folder becomes that of
    the model. Raises CheckpointError for weights that are missing, unexpected, damaged, not finite or of other shapes, ConfigError
    for another type of model.
    """
    path, origins = resolve_run(Path(path)), dict[str, Path]()
    if not path.is_dir():
        state, settings = weights.load_state(path, "llm", LLMConfig)
        if settings is None:
            raise CheckpointError(f"{path}: weights without settings; give the folder that has {_CONFIG} beside them")
    else:
        settings, state = read_config(path), {}
        for name, tensor in _open_weights(path, settings).items():
            converted = _from_hub(name, tensor[tuple(slice(None) for _ in tensor.size)], settings)
            state, origins = state | converted, origins | dict.fromkeys(converted, tensor.path)
        if settings.tied and "model.embed_tokens.weight" in state:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
    if bad := next((name for name, tensor in state.items() if not tensor.isfinite().all()), None):
        raise CheckpointError(f"{origins.get(bad, path)}: {bad} has elements that are not finite; fetch or save it again")
    if cfg is not None:
        sizes = settings.model_dump(exclude={"dropout", "recompute", "deviation", "positions"})
        weights.check_sizes(path, sizes, cfg.model_dump())
        settings = cfg
    with torch.device("meta"):
        model = LLM(settings)
    missing = [name for name in model.state_dict() if name not in state]
    if missing:
        raise CheckpointError(f"{path}: has no {missing[0]}" + (f", nor {len(missing) - 1} others" if missing[1:] else ""))
    for name, tensor in model.state_dict().items():
        if state[name].shape != tensor.shape:
            raise CheckpointError(f"{path}: {name} is {list(state[name].shape)}, the settings make it {list(tensor.shape)}")
    model.load_state_dict(state, assign=True)
    if settings.tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    for name, parameter in model.named_parameters():
        parameter.origin = str(origins.get(name, path).resolve())  # type: ignore[attr-defined]
    model.folder = path if path.is_dir() else path.parent
    return model.eval()


def load_deferred(model: LLM, folder: str | Path) -> LLM:
    """Read the parameters of ``model``, built in ``hpcai.nn.deferred_init``, when they are materialized: of a sharded one the local
    shard only. ``folder``: a Llama folder, a file of ours, or the folder of a run. Raises CheckpointError for weights that do not
    fit, before any is read."""
    folder = resolve_run(Path(folder))
    tensors = _open_weights(folder, model.cfg) if folder.is_dir() else open_tensors(folder)
    source = folder if (folder / _INDEX).exists() or not folder.is_dir() else folder / _FILE
    model.folder = folder if folder.is_dir() else folder.parent
    shared = {"lm_head.weight": "model.embed_tokens.weight"} if model.cfg.tied else {}
    read_on_materialize(model, source, lambda name: shared.get(name, name))
    for name, parameter in model.named_parameters():
        parameter.origin = str(tensors[name].path.resolve())  # type: ignore[attr-defined]
    return model


def save_folder(state: Mapping[str, Tensor], cfg: LLMConfig, folder: str | Path, shard: int = _SHARD_BYTES) -> None:
    """Write weights and settings as a folder of Hugging Face: config.json, and safetensors files of at most ``shard`` bytes with an
    index. Raises CheckpointError for settings that are neither Llama's nor GPT-2's."""
    folder, config = Path(folder), hub_config(cfg, next(iter(state.values())).dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_sharded(_to_hub(state, cfg), folder, _FILE, shard)
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def files(model: LLM, export: Callable[..., None]) -> dict[str, Callable[[Path], Any]]:
    """Return the files of a run and their writers: weights in our format, which is Llama's too, and for a Llama config.json."""
    if model.cfg.rotary is None:  # Hugging Face has other names for the weights of GPT-2
        return {_FILE: export}
    config = json.dumps(hub_config(model.cfg, torch.float32), indent=2) + "\n"
    return {_FILE: export, _CONFIG: lambda path: path.write_text(config)}


# ---- settings


def resolve_run(path: Path) -> Path:
    """Return the weights file of a run, which has the settings, or else ``path``. Raises ConfigError for a folder of adapters."""
    for adapter in (path / "adapter", path):
        if (adapter / "adapter_config.json").is_file() and not (path / _CONFIG).exists() and not (path / _FILE).exists():
            base = read_object(adapter / "adapter_config.json", "settings of an adapter").get("base_model_name_or_path") or "BASE"
            raise ConfigError(f"{path}: holds adapters of a model: give weights={base} adapter={adapter}, or merge them first")
    return path / _FILE if path.is_dir() and not (path / _CONFIG).exists() and (path / _FILE).exists() else path


def read_settings(path: str | Path) -> LLMConfig:
    """Read the settings of a model without its weights, from all that ``load_weights`` accepts."""
    path = resolve_run(Path(path))
    settings = read_config(path) if path.is_dir() else weights.read_settings(path, "llm", LLMConfig)
    if settings is None:
        raise CheckpointError(f"{path}: weights without settings; give the folder that has {_CONFIG} beside them")
    return settings


def read_config(folder: Path) -> LLMConfig:
    """Read the settings from config.json of any version of transformers."""
    path, expected = folder / _CONFIG, "settings as transformers writes them"
    config = read_object(path, expected)
    with check_fields(path, expected, keys=_KEYS.get(str(config.get("model_type")))):
        kind = config["model_type"]
        if kind not in (*_KEYS,):
            raise ConfigError(f"{path}: a model of type {kind!r}; expected one of {', '.join(_KEYS)}")
        values = {field: config[key] for field, key in _KEYS[kind].items()
                  if config.get(key) is not None or field not in _DEFAULTS[kind]}  # fmt: skip
        return LLMConfig(**_DEFAULTS[kind] | values | (_llama if kind == "llama" else _gpt2)(config, path))


def _llama(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    if config.get("hidden_act", "silu") != "silu" or config.get("attention_bias") or config.get("mlp_bias"):
        raise ConfigError(f"{path}: a Llama with other activations than silu, or with biases, which no published one has")
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ConfigError(f"{path}: rope_type is {kind!r}; expected default, linear or llama3")
    scaling = None if kind == "default" else {"kind": kind, "factor": rope["factor"]}
    if kind == "llama3":
        scaling = {**(scaling or {}), **{ours: rope[theirs] for ours, theirs in _LLAMA3.items()}}
    return {"rotary": {"theta": rope.get("rope_theta", config.get("rope_theta", 10_000.0)), "scaling": scaling}}


def _gpt2(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    act = config.get("activation_function", "gelu_new")
    feed = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf"}.get(act)
    if feed is None or config.get("scale_attn_by_inverse_layer_idx"):
        raise ConfigError(f"{path}: a GPT-2 with activation {act!r} or with scaled layers; expected gelu_new or gelu alone")
    return {"inner": config.get("n_inner") or 4 * config["n_embd"], "rotary": None, "norm": "layer", "feed": feed, "bias": True}


def hub_config(cfg: LLMConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return ``cfg`` as config.json for all versions of transformers. Raises CheckpointError if it is neither Llama nor GPT-2."""
    full = cfg.model_copy(update={"key_heads": cfg.kv_heads, "head": cfg.head_dim})
    own: dict[str, Any]
    if (cfg.rotary, cfg.norm, cfg.bias) == (None, "layer", True) and cfg.feed != "swiglu":
        activation = "gelu_new" if cfg.feed == "gelu" else "gelu"
        kind, own = "gpt2", {"architectures": ["GPT2LMHeadModel"], "activation_function": activation}
    else:
        if cfg.rotary is None or (cfg.norm, cfg.feed, cfg.bias) != ("rms", "swiglu", False):
            raise CheckpointError("neither a Llama nor a GPT-2: Hugging Face has no such model; save it as a file of ours")
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": cfg.rotary.theta}
        if (scaling := cfg.rotary.scaling) is not None:
            rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
            rope |= {theirs: getattr(scaling, ours) for ours, theirs in _LLAMA3.items() if scaling.kind == "llama3"}
        kind, own = "llama", {
            "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
            "rope_theta": cfg.rotary.theta, "rope_scaling": rope if scaling else None, "rope_parameters": rope,
        }  # fmt: skip
    sizes = {key: getattr(full, field) for field, key in _KEYS[kind].items()}
    return own | {"model_type": kind, **sizes, "torch_dtype": str(dtype).removeprefix("torch.")}


# ---- names


def _open_weights(folder: Path, cfg: LLMConfig) -> dict[str, LazyTensor]:
    """Open the weights in a folder. Raises CheckpointError for unexpected tensors, or a wrong index."""
    tensors = open_tensors(folder if (folder / _INDEX).exists() else folder / _FILE)
    opened = {name: tensor for name, tensor in tensors.items() if not _IGNORED.fullmatch(name)}
    shapes = {name: tensor.size for name, tensor in opened.items()}
    weights.check_claims(folder / _CONFIG, cfg, shapes, _KEYS["llama" if cfg.rotary else "gpt2"])
    with torch.device("meta"):
        expected = _to_hub(LLM(cfg).state_dict(), cfg)
    short = {name.removeprefix("transformer.") for name in expected}
    for name in opened:
        if name not in expected and name.removeprefix("transformer.") not in short and not (cfg.tied and name == "lm_head.weight"):
            raise CheckpointError(f"{folder}: has {name}, which no module of the settings has; is {_CONFIG} that of these weights?")
    return opened


def _from_hub(name: str, tensor: Tensor, cfg: LLMConfig) -> dict[str, Tensor]:
    """Return a tensor of Hugging Face under our names. GPT-2's matrices are [in, out], with queries, keys and values in one."""
    if cfg.rotary is not None:
        return {name: tensor}
    name = name.removeprefix("transformer.")
    if name in _GPT2_EMBEDDINGS or name == "lm_head.weight":
        return {_GPT2_EMBEDDINGS.get(name, name): tensor}
    if name.startswith("ln_f."):
        return {f"model.norm.{name[5:]}": tensor}
    _, layer, rest = name.split(".", 2)
    module, _, kind = rest.rpartition(".")
    tensor = tensor.T.contiguous() if tensor.ndim == 2 else tensor
    prefix = f"model.layers.{layer}."
    if module == "attn.c_attn":
        return {f"{prefix}self_attn.{x}_proj.{kind}": part.clone() for x, part in zip("qkv", tensor.chunk(3))}
    return {f"{prefix}{_GPT2_LAYER[module]}.{kind}": tensor}


def _to_hub(state: Mapping[str, Tensor], cfg: LLMConfig) -> dict[str, Tensor]:
    """Return ``state`` under the names of Hugging Face, the inverse of ``_from_hub``."""
    untied = {name: tensor for name, tensor in state.items() if not (cfg.tied and name == "lm_head.weight")}
    if cfg.rotary is not None:
        return untied
    hub: dict[str, Tensor] = {}
    others, modules = {ours: theirs for theirs, ours in _GPT2_EMBEDDINGS.items()}, {ours: hf for hf, ours in _GPT2_LAYER.items()}
    for name, tensor in untied.items():
        if name in others:
            hub[f"transformer.{others[name]}"] = tensor
        elif name.startswith("model.norm."):
            hub[f"transformer.ln_f.{name[11:]}"] = tensor
        elif name == "lm_head.weight":
            hub[name] = tensor
        else:
            _, _, layer, module, kind = *name.split(".", 3)[:3], *name.split(".", 3)[3].rsplit(".", 1)
            tensor = tensor.T if tensor.ndim == 2 else tensor
            if module in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
                if module == "self_attn.q_proj":
                    qkv = [state[name.replace("q_proj", f"{x}_proj")] for x in "qkv"]
                    hub[f"transformer.h.{layer}.attn.c_attn.{kind}"] = torch.cat([x.T if x.ndim == 2 else x for x in qkv], -1)
            else:
                hub[f"transformer.h.{layer}.{modules[module]}.{kind}"] = tensor
    return hub
