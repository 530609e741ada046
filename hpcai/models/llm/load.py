"""Language models from folders as Hugging Face has them, and into such: config.json beside safetensors files."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from hpcai.config import format_first_error
from hpcai.errors import CheckpointError, ConfigError
from hpcai.models.llm.config import LLMConfig
from hpcai.models.llm.model import LLM
from hpcai.nn import weights
from hpcai.nn.deferred_init import load_deferred
from hpcai.nn.safetensors_files import LazyTensor, save_sharded, open_tensors

_INDEX, _FILE, _CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
_IGNORED = re.compile(r".*rotary_emb\.inv_freq|.*\.attn\.(masked_)?bias")  # what older files hold beside weights
_SHARD_BYTES = 5_000_000_000  # bytes of a file
_GPT2_LAYER = {  # what GPT-2's files call the parts of a layer
    "ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", "attn.c_proj": "self_attn.o_proj", "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}  # fmt: skip
_GPT2_EMBEDDINGS = {"wte.weight": "model.embed_tokens.weight", "wpe.weight": "model.add_positions.weight"}


def load_weights(path: str | Path, cfg: LLMConfig | None = None) -> LLM:
    """A model in evaluation mode from a folder of Llama or GPT-2 as Hugging Face has it, from a safetensors file of ours, or from
    the folder of a run, which holds one.

    Settings are those of the folder or file; ``cfg`` must agree with them where it is given. A tokenizer beside the weights is the
    model's. Raises CheckpointError for weights that are missing, superfluous, damaged, not finite or of other sizes, ConfigError
    for a model of another kind.
    """
    path, origins = resolve_run(Path(path)), dict[str, Path]()
    if not path.is_dir():
        state, found = weights.load_state(path, "llm", LLMConfig)
        if found is None:
            raise CheckpointError(f"{path}: weights without settings; give the folder that has {_CONFIG} beside them")
    else:
        found, state = read_config(path), {}
        for name, tensor in _open_weights(path, found).items():
            more = _from_hub(name, tensor[tuple(slice(None) for _ in tensor.size)], found)
            state, origins = state | more, origins | dict.fromkeys(more, tensor.path)
        if found.tied and "model.embed_tokens.weight" in state:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
    if bad := next((name for name, tensor in state.items() if not tensor.isfinite().all()), None):
        raise CheckpointError(f"{path}: {bad} has numbers that are not finite; fetch or save it again")
    if cfg is not None:
        sizes = found.model_dump(exclude={"dropout", "recompute", "deviation", "positions"})
        weights.check_sizes(path, sizes, cfg.model_dump())
        found = cfg
    with torch.device("meta"):
        model = LLM(found)
    missing = [name for name in model.state_dict() if name not in state]
    if missing:
        raise CheckpointError(f"{path}: has no {missing[0]}" + (f", nor {len(missing) - 1} others" if missing[1:] else ""))
    _check_sizes(path, model, {name: tuple(tensor.shape) for name, tensor in state.items()})
    model.load_state_dict(state, assign=True)
    if found.tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    for name, parameter in model.named_parameters():
        parameter.origin = str(origins.get(name, path).resolve())  # type: ignore[attr-defined]
    model.folder = path if path.is_dir() else path.parent
    return model.eval()


def load_deferred(model: LLM, folder: str | Path) -> LLM:
    """Have the parameters of ``model``, which is built in ``hpcai.nn.deferred_init`` and may be cut, read from a folder of Llama, a
    file of ours or the folder of a run, which holds one, when they are made: of each the part that is held. Raises CheckpointError
    for weights that do not fit, before any is read."""
    folder = resolve_run(Path(folder))
    there = _open_weights(folder, model.cfg) if folder.is_dir() else open_tensors(folder)
    source = folder if (folder / _INDEX).exists() or not folder.is_dir() else folder / _FILE
    model.folder = folder if folder.is_dir() else folder.parent
    load_deferred(model, source, lambda name: "model.embed_tokens.weight" if model.cfg.tied and name == "lm_head.weight" else name)
    for name, parameter in model.named_parameters():
        parameter.origin = str(there[name].path.resolve())  # type: ignore[attr-defined]
    return model


def save_folder(state: Mapping[str, Tensor], cfg: LLMConfig, folder: str | Path, shard: int = _SHARD_BYTES) -> None:
    """Weights by name and settings as a folder that Hugging Face's libraries read: config.json, and safetensors files of at most
    ``shard`` bytes with their index. Raises CheckpointError for a model that they have no name for."""
    folder, about = Path(folder), hub_config(cfg, next(iter(state.values())).dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_sharded(_to_hub(state, cfg), folder, _FILE, shard)
    (folder / _CONFIG).write_text(json.dumps(about, indent=2) + "\n")


def files(model: LLM, export: Callable[..., None]) -> dict[str, Callable[[Path], Any]]:
    """What a run leaves: weights as a file of ours, which is also that of a Llama, and then its config.json."""
    if model.cfg.rotary is None:  # GPT-2's weights have other names there
        return {_FILE: export}
    about = json.dumps(hub_config(model.cfg, torch.float32), indent=2) + "\n"
    return {_FILE: export, _CONFIG: lambda path: path.write_text(about)}


# ---- settings


def resolve_run(path: Path) -> Path:
    """The file that has settings of its own in a folder that has none beside it, as a run leaves; else the path itself."""
    return path / _FILE if path.is_dir() and not (path / _CONFIG).exists() and (path / _FILE).exists() else path


def read_settings(path: str | Path) -> LLMConfig:
    """The settings of what ``load_weights`` reads, without its weights."""
    path = resolve_run(Path(path))
    found = read_config(path) if path.is_dir() else weights.read_settings(path, "llm", LLMConfig)
    if found is None:
        raise CheckpointError(f"{path}: weights without settings; give the folder that has {_CONFIG} beside them")
    return found


def read_config(folder: Path) -> LLMConfig:
    """The settings in a folder's config.json, as any version of transformers writes it."""
    path = folder / _CONFIG
    try:
        found = json.loads(path.read_text())
        kind = found["model_type"]
    except (OSError, ValueError, LookupError, TypeError) as problem:
        raise CheckpointError(f"{path}: no settings of a model: {problem!r}; expected JSON with a model_type") from problem
    readers = {"llama": _llama, "gpt2": _gpt2}
    if kind not in readers:
        raise ConfigError(f"{path}: a model of type {kind!r}; expected one of {', '.join(readers)}")
    try:
        return LLMConfig(**readers[kind](found, path))
    except ValidationError as problem:
        raise ConfigError(f"{path}: {format_first_error(problem)}") from problem
    except KeyError as problem:
        raise CheckpointError(f"{path}: has no {problem}") from problem
    except (TypeError, AttributeError) as problem:
        raise CheckpointError(f"{path}: {problem}; expected settings as transformers writes them") from problem


def _llama(found: Mapping[str, Any], path: Path) -> dict[str, Any]:
    if found.get("hidden_act", "silu") != "silu" or found.get("attention_bias") or found.get("mlp_bias"):
        raise ConfigError(f"{path}: a Llama with other activations than silu, or with biases, which no published one has")
    rope = {**(found.get("rope_scaling") or {}), **(found.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ConfigError(f"{path}: rope_type is {kind!r}; expected default, linear or llama3")
    scaling = None if kind == "default" else {"kind": kind, "factor": rope["factor"]}
    if kind == "llama3":
        words = {"low": "low_freq_factor", "high": "high_freq_factor", "original": "original_max_position_embeddings"}
        scaling = {**(scaling or {}), **{ours: rope[theirs] for ours, theirs in words.items()}}
    theta = rope.get("rope_theta", found.get("rope_theta", 10_000.0))
    return {
        "vocabulary": found["vocab_size"], "width": found["hidden_size"], "layers": found["num_hidden_layers"],
        "heads": found["num_attention_heads"], "key_heads": found.get("num_key_value_heads"), "head": found.get("head_dim"),
        "inner": found["intermediate_size"], "positions": found.get("max_position_embeddings", 2048),
        "rotary": {"theta": theta, "scaling": scaling}, "eps": found.get("rms_norm_eps", 1e-6),
        "tied": bool(found.get("tie_word_embeddings", False)), "deviation": found.get("initializer_range", 0.02),
    }  # fmt: skip


def _gpt2(found: Mapping[str, Any], path: Path) -> dict[str, Any]:
    act = found.get("activation_function", "gelu_new")
    feed = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf"}.get(act)
    if feed is None or found.get("scale_attn_by_inverse_layer_idx"):
        raise ConfigError(f"{path}: a GPT-2 with activation {act!r} or with scaled layers; expected gelu_new or gelu alone")
    return {
        "vocabulary": found["vocab_size"], "width": found["n_embd"], "layers": found["n_layer"], "heads": found["n_head"],
        "inner": found.get("n_inner") or 4 * found["n_embd"], "positions": found["n_positions"], "rotary": None, "norm": "layer",
        "feed": feed, "bias": True, "tied": found.get("tie_word_embeddings", True),
        "eps": found.get("layer_norm_epsilon", 1e-5), "deviation": found.get("initializer_range", 0.02),
    }  # fmt: skip


def hub_config(cfg: LLMConfig, dtype: torch.dtype) -> dict[str, Any]:
    """``cfg`` as config.json has it, in the words of all versions of transformers. Raises CheckpointError."""
    kind = str(dtype).removeprefix("torch.")
    if (cfg.rotary, cfg.norm, cfg.bias) == (None, "layer", True) and cfg.feed != "swiglu":
        return {
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": cfg.vocabulary, "n_embd": cfg.width,
            "n_layer": cfg.layers, "n_head": cfg.heads, "n_inner": cfg.inner, "n_positions": cfg.positions,
            "layer_norm_epsilon": cfg.eps, "activation_function": "gelu_new" if cfg.feed == "gelu" else "gelu",
            "initializer_range": cfg.deviation, "tie_word_embeddings": cfg.tied, "torch_dtype": kind,
        }  # fmt: skip
    if cfg.rotary is None or (cfg.norm, cfg.feed, cfg.bias) != ("rms", "swiglu", False):
        raise CheckpointError("neither a Llama nor a GPT-2, whose weights have names elsewhere; save it as a file of ours")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": cfg.rotary.theta}
    if (scaling := cfg.rotary.scaling) is not None:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
            rope |= {"original_max_position_embeddings": scaling.original}
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": cfg.vocabulary, "hidden_size": cfg.width,
        "num_hidden_layers": cfg.layers, "num_attention_heads": cfg.heads, "num_key_value_heads": cfg.kv_heads, "head_dim": cfg.head_dim,
        "intermediate_size": cfg.inner, "max_position_embeddings": cfg.positions, "rms_norm_eps": cfg.eps, "hidden_act": "silu",
        "rope_theta": cfg.rotary.theta, "rope_scaling": rope if cfg.rotary.scaling else None, "rope_parameters": rope,
        "attention_bias": False, "mlp_bias": False, "initializer_range": cfg.deviation, "tie_word_embeddings": cfg.tied,
        "torch_dtype": kind,
    }  # fmt: skip


# ---- names


def _open_weights(folder: Path, cfg: LLMConfig) -> dict[str, LazyTensor]:
    """The tensors of a folder that are weights of the model. Raises CheckpointError where there are others, or a wrong index."""
    there = open_tensors(folder if (folder / _INDEX).exists() else folder / _FILE)
    found = {name: tensor for name, tensor in there.items() if not _IGNORED.fullmatch(name)}
    with torch.device("meta"):
        known = _to_hub(LLM(cfg).state_dict(), cfg)
    short = {name.removeprefix("transformer.") for name in known}
    for name in found:
        if name not in known and name.removeprefix("transformer.") not in short and not (cfg.tied and name == "lm_head.weight"):
            raise CheckpointError(f"{folder}: has {name}, for which settings have no place; is {_CONFIG} that of these weights?")
    return found


def _from_hub(name: str, tensor: Tensor, cfg: LLMConfig) -> dict[str, Tensor]:
    """A tensor of a file under our names: that of GPT-2's layers lies [in, out], queries, keys and values in one."""
    if cfg.rotary is not None:
        return {name: tensor}
    name = name.removeprefix("transformer.")
    if name in _GPT2_EMBEDDINGS or name == "lm_head.weight":
        return {_GPT2_EMBEDDINGS.get(name, name): tensor}
    if name.startswith("ln_f."):
        return {f"model.norm.{name[5:]}": tensor}
    _, number, rest = name.split(".", 2)
    part, _, kind = rest.rpartition(".")
    tensor = tensor.T.contiguous() if tensor.ndim == 2 else tensor
    before = f"model.layers.{number}."
    if part == "attn.c_attn":
        return {f"{before}self_attn.{x}_proj.{kind}": piece.clone() for x, piece in zip("qkv", tensor.chunk(3))}
    return {f"{before}{_GPT2_LAYER[part]}.{kind}": tensor}


def _to_hub(state: Mapping[str, Tensor], cfg: LLMConfig) -> dict[str, Tensor]:
    """``state`` under the names of Hugging Face's files, the adjoint of ``_converted``."""
    rest = {name: tensor for name, tensor in state.items() if not (cfg.tied and name == "lm_head.weight")}
    if cfg.rotary is not None:
        return rest
    found: dict[str, Tensor] = {}
    around, layer = {ours: theirs for theirs, ours in _GPT2_EMBEDDINGS.items()}, {ours: theirs for theirs, ours in _GPT2_LAYER.items()}
    for name, tensor in rest.items():
        if name in around:
            found[f"transformer.{around[name]}"] = tensor
        elif name.startswith("model.norm."):
            found[f"transformer.ln_f.{name[11:]}"] = tensor
        elif name == "lm_head.weight":
            found[name] = tensor
        else:
            _, _, number, part, kind = *name.split(".", 3)[:3], *name.split(".", 3)[3].rsplit(".", 1)
            tensor = tensor.T if tensor.ndim == 2 else tensor
            if part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
                if part == "self_attn.q_proj":
                    three = [state[name.replace("q_proj", f"{x}_proj")] for x in "qkv"]
                    found[f"transformer.h.{number}.attn.c_attn.{kind}"] = torch.cat([x.T if x.ndim == 2 else x for x in three], -1)
            else:
                found[f"transformer.h.{number}.{layer[part]}.{kind}"] = tensor
    return found


def _check_sizes(path: Path, model: LLM, sizes: Mapping[str, tuple[int, ...]]) -> None:
    for name, tensor in model.state_dict().items():
        if sizes[name] != tuple(tensor.shape):
            raise CheckpointError(f"{path}: {name} is {list(sizes[name])}, the settings make it {list(tensor.shape)}")
