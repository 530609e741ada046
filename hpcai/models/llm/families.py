"""Families of language models in Hugging Face's format: settings and names of tensors, as tables (``families.json``).

    cfg = read_config(folder)                       # config.json -> LLMConfig
    for rule in tensor_rules(cfg, kind, sizes):     # tensors of the files <-> parameters
        ...

A family is an entry of the table: ``keys`` maps settings to keys of config.json, ``values`` those with other values there,
``defaults`` has the values of keys that are absent, ``fixed`` the settings of all of its models, ``expected`` the only values of a
key that hpcai computes, ``names`` the tensors with other names than here, and ``like`` the family that it extends. A key that is
not in its tables and not ``ignored``, since it may change the mathematics, is refused unless it is null or false.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcai.errors import CheckpointError, ConfigError
from hpcai.json_file import check_fields, read_object
from hpcai.models.llm.config import LLMConfig
from hpcai.nn.safetensors_files import Lazy, RangeView, ReorderedView, StackedView, TransposedView

CONFIG, OURS = "config.json", "ours"  # OURS: files with the names and shapes of parameters here
_TABLES: dict[str, Any] = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))
_KINDS: list[str] = list(_TABLES["families"])  # as ``model_type`` of config.json
_SCALING: dict[str, dict[str, str]] = _TABLES["scaling"]
_IGNORED_ROPE = {"rope_theta", "rope_type", "type", "partial_rotary_factor", "finetuned"}
TRAINING_SETTINGS = {"dropout", "recompute", "deviation", "z_loss", "mtp_loss"}
"""settings that config.json does not determine"""
TRAINING_EXPERTS = {"balance_loss", "z_loss", "bias_update_rate", "capacity"}


@cache
def family(kind: str) -> dict[str, Any]:
    """Return the tables of a family, with those of the families that it extends."""
    own = {} if kind == OURS else _TABLES["families"][kind]
    if "like" not in own:
        return {"keys": {}, "values": {}, "defaults": {}, "fixed": {}, "expected": {}, "ignored": [], "names": [], **own}
    base = family(own["like"])
    merged = {name: {**value, **own.get(name, {})} for name, value in base.items() if isinstance(value, dict)}
    return base | own | merged | {"ignored": [*base["ignored"], *own.get("ignored", [])]}


# ---- settings


def read_config(folder: Path) -> LLMConfig:
    """Read the settings from config.json of any version of transformers. Dropout and coefficients of auxiliary losses are not read:
    training sets them. Raises ConfigError for a family or a setting that hpcai does not compute."""
    path, expected = folder / CONFIG, "settings as transformers writes them"
    config = read_object(path, expected)
    kind = str(config.get("model_type"))
    with check_fields(path, expected, keys=family(kind)["keys"] if kind in _KINDS else None):
        if kind not in _KINDS:
            raise ConfigError(f"{path}: a model of type {config['model_type']!r}; expected one of {', '.join(_KINDS)}")
        method = (config.get("quantization_config") or {}).get("quant_method")
        if method is not None and (method, kind) != ("mxfp4", "gpt_oss"):
            raise ConfigError(f"{path}: weights are quantized by {method}, expected 16 bits or more; fetch or save the model so")
        return _parse_config(config, kind, path)


def _parse_config(config: Mapping[str, Any], kind: str, path: object) -> LLMConfig:
    table = family(kind)
    config = {table.get("aliases", {}).get(key, key): value for key, value in config.items()}
    known = {
        *_TABLES["ignored"], *_TABLES["rope"], *table["ignored"], *table["keys"].values(), *table["defaults"], *table["expected"],
        *(key for key, _ in table["values"].values()), *table.get("biases", ()), "quantization_config", "layer_types",
    }  # fmt: skip
    unknown = [f"{key}={value!r}" for key, value in config.items() if key not in known and key[0] != "_" and value]
    unknown += [f"{key}={config[key]!r}" for key, values in table["expected"].items() if config.get(key, values[0]) not in values]
    if unknown:
        advice = f"no {kind} that hpcai computes has this; remove it from the file if it does not change the numbers of the model"
        raise ConfigError(f"{path}: {', '.join(unknown)[:300]}: {advice}")
    config = table["defaults"] | config
    values = {ours: config[theirs] for ours, theirs in table["keys"].items() if theirs and config.get(theirs) is not None}
    for ours, (theirs, choices) in table["values"].items():
        if config[theirs] not in choices:
            raise ConfigError(f"{path}: {theirs} is {config[theirs]!r}, expected one of {', '.join(choices)}")
        values[ours] = choices[config[theirs]]
    if keys := table.get("biases"):
        attention, mlp = (bool(config.get(key)) for key in (*keys, "")[:2])
        values["bias"] = (attention and mlp) or ("attention" if attention else "mlp" if mlp else False)
    if scalar := config.get("query_pre_attn_scalar"):
        values["attention_scale"] = scalar**-0.5
    values |= {"rotary": _rotary(config, path), "inner": values.get("inner", 4 * values["width"])} | _windows(config, table, path)
    if "dense" in table:
        values["experts.dense_layers"] = tuple(_dense_layers(config, table["dense"]))
        if shared := config.get("n_shared_experts"):
            values["experts.shared"] = shared * config["moe_intermediate_size"]
    nested: dict[str, Any] = {}
    for name, value in (values | table["fixed"]).items():
        section, _, field = name.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[field] = value
    return LLMConfig(**nested)


def _rotary(config: Mapping[str, Any], path: object) -> dict[str, Any]:
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    local_theta = config.get("rope_local_base_freq")
    if "full_attention" in rope:
        local_theta, rope = rope["sliding_attention"].get("rope_theta", local_theta), rope["full_attention"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "longrope" if kind == "su" or (config["model_type"] == "phi3" and kind == "yarn") else kind
    if kind != "default" and kind not in _SCALING:
        raise ConfigError(f"{path}: rope_type is {kind!r}; expected default, {', '.join(_SCALING)}")
    if unknown := sorted({*rope} - _IGNORED_ROPE - {*_SCALING.get(kind, ()), *_SCALING.get(kind, {}).values()}):
        raise ConfigError(f"{path}: a rope of type {kind} with {', '.join(unknown)}, which hpcai does not compute")
    fraction = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    theta = rope.get("rope_theta", config.get("rope_theta")) or 10_000.0
    rotary = {"theta": theta, "fraction": fraction or 1.0, "local_theta": local_theta}
    if kind == "default":
        return rotary
    positions = config["max_position_embeddings"]
    if kind in ("linear", "dynamic", "llama3"):
        scaling = {ours: rope[theirs] for ours, theirs in _SCALING[kind].items()}
        scaling |= {"original": positions} if kind == "dynamic" else {}
    else:
        given = {ours: rope[theirs] for ours, theirs in _SCALING[kind].items() if rope.get(theirs) is not None}
        scaling = {"original": config.get("original_max_position_embeddings") or positions} | given
        scaling.setdefault("factor", positions / scaling["original"])
    scaling = {ours: tuple(value) if isinstance(value, list) else value for ours, value in scaling.items()}
    return rotary | {"scaling": {"kind": kind, **scaling}}


def _windows(config: Mapping[str, Any], table: Mapping[str, Any], path: object) -> dict[str, Any]:
    """Return the sliding window and the layers without it."""
    form, window, layers = table.get("windows"), config.get("sliding_window"), config.get("num_hidden_layers", 0)
    types = config.get("layer_types")
    known = {"full_attention"} if form in (None, "all") else {"full_attention", "sliding_attention"}
    if others := sorted({*(types or ())} - known):
        raise ConfigError(f"{path}: layer_types has {', '.join(others)}, expected {' or '.join(sorted(known))}")
    if form is None or not window or config.get("use_sliding_window") is False:
        return {}
    if form == "all":
        full: Sequence[int] = ()
    elif types is not None:
        full = [n for n, each in enumerate(types) if each == "full_attention"]
    elif form == "last":
        full = range(min(config["max_window_layers"], layers))
    else:
        period = config[form] if form in config else int(form)
        full = range(period - 1, layers, period)
    return {} if len(full) == layers else {"window": window, "full_layers": tuple(full)}


def _dense_layers(config: Mapping[str, Any], key: str) -> Iterator[int]:
    for layer in range(config["num_hidden_layers"]):
        if key == "first_k_dense_replace":
            is_dense = layer < config[key]
        else:
            is_dense = layer in (config[key] or ()) or (layer + 1) % config["decoder_sparse_step"] > 0
        if is_dense:
            yield layer


def comparable(cfg: LLMConfig) -> LLMConfig:
    """Return ``cfg`` without what config.json does not determine."""
    fields = LLMConfig.model_fields
    changes: dict[str, Any] = {name: fields[name].get_default() for name in TRAINING_SETTINGS}
    changes |= {"head": None if cfg.latent else cfg.head_dim, "key_heads": cfg.kv_heads}
    if cfg.experts is not None:
        defaults = {name: type(cfg.experts).model_fields[name].get_default() for name in TRAINING_EXPERTS}
        changes["experts"] = cfg.experts.model_copy(update=defaults)
        if all(map(cfg.has_experts, range(cfg.layers))):
            changes["inner"] = cfg.experts.inner  # no layer has the other
    return cfg.model_copy(update=changes)


def hub_config(cfg: LLMConfig, dtype: torch.dtype, source: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return ``cfg`` as config.json for all versions of transformers, with token ids and other keys that hpcai does not read from
    ``source``, the config.json of the original model. Raises CheckpointError if no family has these settings."""
    source = source or {}
    for kind in sorted(_KINDS, key=lambda kind: kind != source.get("model_type")):
        config = _write_config(cfg, kind)
        try:
            read = _parse_config(config, kind, "")
        except (ConfigError, ValueError, TypeError, KeyError):
            continue
        if comparable(read) == comparable(cfg):
            kept = {key: source[key] for key in _TABLES["ignored"] if key in source and kind == source.get("model_type")}
            return kept | config | {"torch_dtype": str(dtype).removeprefix("torch.")}
    raise CheckpointError("no family of Hugging Face has the settings of this model; save it as a file of ours")


def _write_config(cfg: LLMConfig, kind: str) -> dict[str, Any]:
    table, nested = family(kind), cfg.model_copy(update={"key_heads": cfg.kv_heads, "head": cfg.head_dim}).model_dump()

    def setting(name: str) -> Any:
        section, _, field = name.rpartition(".")
        return ((nested[section] or {}) if section else nested).get(field)

    config = {key: value for key, value in table["defaults"].items() if not key.startswith("rope_")}
    config |= {theirs: setting(ours) for ours, theirs in table["keys"].items() if theirs}
    config |= {key: values[0] for key, values in table["expected"].items()}
    for ours, (theirs, choices) in table["values"].items():
        config[theirs] = next((value for value, each in choices.items() if each == setting(ours)), None)
    for key, part in zip(table.get("biases", ()), ("qkv", "mlp")):
        config[key] = cfg.has_bias(part)  # type: ignore[arg-type]
    if "query_pre_attn_scalar" in config:
        scalar = cfg.attention_scale**-2 if cfg.attention_scale else cfg.head_dim
        config["query_pre_attn_scalar"] = round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar
    if (experts := cfg.experts) is not None and "dense" in table:
        is_first = table["dense"] == "first_k_dense_replace"
        config[table["dense"]] = len(experts.dense_layers) if is_first else list(experts.dense_layers)
        if "n_shared_experts" in config:
            config["n_shared_experts"] = (experts.shared or 0) // experts.inner
    if table.get("windows") is not None:
        config["sliding_window"] = cfg.window
        if "use_sliding_window" in config:
            config["use_sliding_window"] = cfg.window is not None
        if "max_window_layers" in config and cfg.window is not None:
            config["max_window_layers"] = len(cfg.full_layers)
        if table["windows"] != "all":
            local = "full_attention" if cfg.window is None else "sliding_attention"
            config["layer_types"] = ["full_attention" if n in cfg.full_layers else local for n in range(cfg.layers)]
    own = {"architectures": [table["architecture"]], "model_type": kind}
    return config | own | (_write_rotary(cfg) if "rotary" not in table["fixed"] else {})


def _write_rotary(cfg: LLMConfig) -> dict[str, Any]:
    if cfg.rotary is None:
        return {}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": cfg.rotary.theta}
    if (scaling := cfg.rotary.scaling) is not None:
        rope |= {"rope_type": scaling.kind, **{theirs: getattr(scaling, ours) for ours, theirs in _SCALING[scaling.kind].items()}}
        rope = {key: list(value) if isinstance(value, tuple) else value for key, value in rope.items() if value is not None}
    config: dict[str, Any] = {"rope_theta": cfg.rotary.theta, "rope_scaling": rope if scaling else None}
    if cfg.rotary.fraction < 1:
        rope["partial_rotary_factor"] = config["partial_rotary_factor"] = cfg.rotary.fraction
    if scaling is not None and scaling.kind == "longrope":
        config["original_max_position_embeddings"] = scaling.original
    if (theta := cfg.rotary.local_theta) is None:
        return config | {"rope_parameters": rope}
    local = {"rope_type": "default", "rope_theta": theta}
    return config | {"rope_local_base_freq": theta, "rope_parameters": {"full_attention": rope, "sliding_attention": local}}


# ---- tensors


class Rule(NamedTuple):
    """Tensors of the files that have the elements of some parameters."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    form: str
    """same; transposed: the last two dims; fused: parameters are concatenated in dim 0; experts: one tensor for each expert;
    interleaved: rows of gate and up alternate, transposed; rotary: pairs of rotated channels are neighbours; copy: repeated"""


def tensor_rules(cfg: LLMConfig, kind: str, sizes: Mapping[str, Sequence[int]]) -> list[Rule]:
    """Return the rules of all parameters and buffers, of which ``sizes`` has the shapes by name."""
    table = {name: (theirs, ours, form[0] if form else "same") for theirs, ours, *form in family(kind)["names"] for name in ours}
    rules: dict[str, Rule] = {}
    for name in sizes:
        if (cfg.tied and name == "lm_head.weight") or name == "model.mtp.embed_tokens.weight":
            continue
        inside = "model.mtp." if kind != OURS and name.startswith("model.mtp.") else "model."
        layer = re.search(r"(?<=\.layers\.)\d+", name)
        place = {"l": layer[0] if layer else "", "p": name.rpartition(".")[2]}
        general = name if layer is None else f"{name[: layer.start()]}{{l}}{name[layer.end() :]}".replace(inside, "model.", 1)
        stem = general.removesuffix(place["p"])
        theirs, ours, form = table.get(general) or table.get(f"{stem}{{p}}") or (general, [general], "same")
        target = _fill(theirs, place if inside == "model." else place | {"l": str(cfg.layers + int(place["l"]))})
        names = [target.replace("{e}", str(n)) for n in range(sizes[name][0] if form == "experts" else 1)]
        filled = (_fill(x, place).replace("model.", inside, 1) for x in ours)
        rules.setdefault(target, Rule((*names,), tuple(each for each in filled if each in sizes), form))
    for n in range(cfg.layers, cfg.total_layers if kind != OURS else 0):
        head = "model.embed_tokens" if cfg.tied else "lm_head"
        for end, ours in ("embed_tokens", "model.embed_tokens"), ("shared_head.head", head):
            rules[f"{n}.{end}"] = Rule((f"model.layers.{n}.{end}.weight",), (f"{ours}.weight",), "copy")
    return list(rules.values())


def _fill(template: str, place: Mapping[str, str]) -> str:
    return template.replace("{l}", place["l"]).replace("{p}", place["p"])


def views(rule: Rule, stored: Callable[[str], Lazy], cfg: LLMConfig, sizes: Mapping[str, Sequence[int]]) -> dict[str, Lazy]:
    """Return the parameters of a rule as views of the tensors that ``stored`` returns by name."""
    if rule.form == "experts":
        return {rule.ours[0]: StackedView(tuple(map(stored, rule.theirs)))}
    tensor = stored(rule.theirs[0])
    if rule.form == "rotary":
        return {rule.ours[0]: ReorderedView(tensor, tuple(rotary_order(cfg, rule.ours[0], tensor.size[0])))}
    if rule.form in ("transposed", "interleaved") and len(tensor.size) > 1 and not rule.theirs[0].endswith("_proj_bias"):
        tensor = TransposedView(tensor)
    if rule.form == "interleaved":
        return {name: RangeView(tensor, 1, first, tensor.size[1] // 2, 2) for first, name in enumerate(rule.ours)}
    if len(rule.ours) == 1:
        return {rule.ours[0]: tensor}
    begin, parts = 0, dict[str, Lazy]()
    for name in rule.ours:
        parts[name] = RangeView(tensor, 0, begin, sizes[name][0])
        begin += sizes[name][0]
    if begin != tensor.size[0]:
        raise CheckpointError(f"{rule.theirs[0]} has {tensor.size[0]} outputs, the settings make it {begin}")
    return parts


def to_hub(rule: Rule, state: Mapping[str, Tensor], cfg: LLMConfig) -> dict[str, Tensor]:
    """Return the tensors of the files from the parameters in ``state``, the inverse of ``views``."""
    tensors = [state[name] for name in rule.ours]
    if rule.form == "experts":
        return dict(zip(rule.theirs, tensors[0].unbind()))
    if rule.form == "copy":
        return {rule.theirs[0]: tensors[0].clone()}  # safetensors refuses shared memory
    if rule.form == "rotary":
        order = torch.tensor(rotary_order(cfg, rule.ours[0], len(tensors[0])), device=tensors[0].device).argsort()
        return {rule.theirs[0]: tensors[0][order]}
    if rule.form == "interleaved":
        tensor = torch.stack(tensors, 2).flatten(1, 2)
    else:
        tensor = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    if rule.form in ("transposed", "interleaved") and tensor.ndim > 1 and not rule.theirs[0].endswith("_proj_bias"):
        tensor = tensor.transpose(-1, -2)
    return {rule.theirs[0]: tensor}


def rotary_order(cfg: LLMConfig, name: str, rows: int) -> list[int]:
    """Return the row of the file for each row here, of queries or compressed keys in latent attention: in the file, the channels of
    a rotated pair are neighbours."""
    assert cfg.latent is not None
    rope, period = cfg.latent.rope, rows if "kv_a_proj" in name else cfg.head_dim
    first = period - rope
    within = [*range(first), *range(first, period, 2), *range(first + 1, period, 2)]
    return [begin + row for begin in range(0, rows, period) for row in within]


def hub_modules(cfg: LLMConfig, kind: str, sizes: Mapping[str, Sequence[int]]) -> dict[str, tuple[str, ...]]:
    """Return the name of each linear layer in the files, with those here that its outputs belong to, in their order."""
    rules = (rule for rule in tensor_rules(cfg, kind, sizes) if rule.form in ("same", "transposed", "fused"))
    named = {rule.theirs[0]: rule.ours for rule in rules if rule.ours[0].endswith(("_proj.weight", "lm_head.weight"))}
    return {theirs.removesuffix(".weight"): tuple(name.removesuffix(".weight") for name in ours) for theirs, ours in named.items()}
