"""Read and write language models as folders of Hugging Face: config.json and safetensors files."""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from hpcai.errors import CheckpointError, ConfigError
from hpcai.json_file import read_object
from hpcai.models.llm import families
from hpcai.models.llm.config import LLMConfig
from hpcai.models.llm.critic import Critic
from hpcai.models.llm.model import LLM
from hpcai.models.llm.mxfp4 import Mxfp4View
from hpcai.nn import weights
from hpcai.nn.deferred_init import deferred, read_on_materialize
from hpcai.nn.safetensors_files import Lazy, LazyTensor, TransposedView, open_tensors, read_full, save_sharded, write_tensors

logger = logging.getLogger(__name__)
_INDEX, _FILE, _GENERATION = "model.safetensors.index.json", "model.safetensors", "generation_config.json"
_UNUSED = re.compile(r".*rotary_emb\.inv_freq|.*\.attn\.(masked_)?bias")  # buffers in older files
_FLOATS = {"F64", "F32", "F16", "BF16"}
_SHARD_BYTES = 5_000_000_000
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load_weights(path: str | Path, cfg: LLMConfig | None = None) -> LLM:
    """Load a model in evaluation mode from a folder of Hugging Face of one of the families (``hpcai.models.llm.families``), a
    safetensors file of ours, or the folder of a run.

    The settings are those of the folder or file; ``cfg``, if given, must agree with them. A tokenizer in the folder becomes that of
    the model. Layers of multi-token prediction beyond ``cfg.mtp_layers`` are not read. Raises CheckpointError for weights that are
    missing, unexpected, damaged, not finite or of other shapes, ConfigError for another type of model.
    """
    path = resolve_run(Path(path))
    settings = read_settings(path)
    if cfg is not None:
        chosen = {"positions", "mtp_layers"}
        weights.check_sizes(path, families.comparable(settings).model_dump(exclude=chosen), families.comparable(cfg).model_dump())
        settings = cfg
    tensors = _open_weights(path, settings)
    with deferred():
        model = LLM(settings)
    for name, tensor in model.state_dict().items():
        if tensors[name].size != tensor.shape:
            raise CheckpointError(f"{path}: {name} is {list(tensors[name].size)}, the settings make it {list(tensor.shape)}")
    model.load_state_dict({name: read_full(tensors[name]) for name in model.state_dict()}, assign=True)
    if settings.tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    for name, parameter in model.named_parameters():
        parameter.origin = str(tensors[name].path.resolve())  # type: ignore[attr-defined]
    model.folder = path if path.is_dir() else path.parent
    return model.eval()


def override_settings(folder: str | Path, cfg: LLMConfig) -> LLMConfig:
    """Return the settings of the weights in ``folder``, with those of training and ``positions`` from ``cfg`` where they are no
    defaults. Raises ConfigError for another setting of ``cfg`` that differs from that of the weights."""
    loaded, changes, free = read_settings(folder), cfg.changed, {*families.TRAINING_SETTINGS, "positions"}
    if "mtp_layers" in cfg.model_fields_set and cfg.mtp_layers < loaded.mtp_layers:
        loaded = loaded.model_copy(update={"mtp_layers": cfg.mtp_layers})
    if loaded.experts is not None and (experts := changes.pop("experts", None)) is not None:
        updates = {name: getattr(experts, name) for name in experts.model_fields_set}
        for name, value in updates.items():
            if name not in families.TRAINING_EXPERTS and value != getattr(loaded.experts, name):
                ours = getattr(loaded.experts, name)
                raise ConfigError(f"model.experts.{name} is {value}, in {folder} it is {ours}; leave it out")
        loaded = loaded.model_copy(update={"experts": loaded.experts.model_copy(update=updates)})
    for name, value in changes.items():
        if name not in free and value != getattr(loaded, name):
            raise ConfigError(f"model.{name} is {value}, in {folder} it is {getattr(loaded, name)}; leave it out")
    return loaded.model_copy(update={name: changes[name] for name in free & set(changes)})


def load_deferred(model: LLM, folder: str | Path) -> LLM:
    """Read the parameters of ``model``, built in ``hpcai.nn.deferred_init``, when they are materialized: of a sharded one the local
    shard only. ``folder``: as for ``load_weights``; of a ``Critic`` also weights without its head, which keeps its initialisation.
    Raises CheckpointError for weights that do not fit, before any is read."""
    folder, part, cfg = resolve_run(Path(folder)), cast(nn.Module, model), model.cfg
    if isinstance(model, Critic) and not _has_value_head(folder):
        part, cfg = model.model, cfg.model_copy(update={"tied": read_settings(folder).tied})
    prefix = "" if part is model else "model."
    tensors = {name.removeprefix(prefix): tensor for name, tensor in _open_weights(folder, cfg).items() if name.startswith(prefix)}
    model.folder = folder if folder.is_dir() else folder.parent
    read_on_materialize(part, tensors, where=folder)
    for name, parameter in part.named_parameters():
        parameter.origin = str(tensors[name].path.resolve())  # type: ignore[attr-defined]
    return model


def save_folder(
    state: Mapping[str, Tensor], cfg: LLMConfig, folder: str | Path, shard: int = _SHARD_BYTES, source: str | Path | None = None
) -> None:
    """Write weights and settings as a folder of Hugging Face: config.json, and safetensors files of at most ``shard`` bytes with an
    index. ``source``: The folder of the original model, for its family, token ids and generation_config.json. Raises
    CheckpointError for settings that no family has."""
    folder, original = Path(folder), _source_config(source)
    config = families.hub_config(cfg, next(iter(state.values())).dtype, original)
    folder.mkdir(parents=True, exist_ok=True)
    save_sharded(hub_state(state, cfg, config["model_type"]), folder, _FILE, shard)
    _write_json(folder / families.CONFIG, config)
    if (generation := _generation_config(source, original)) is not None:
        _write_json(folder / _GENERATION, generation)


def hub_state(state: Mapping[str, Tensor], cfg: LLMConfig, kind: str | None = None) -> dict[str, Tensor]:
    """Return parameters under the names and in the shapes of a family, by default the first that has these settings."""
    kind = kind or families.hub_config(cfg, torch.float32)["model_type"]
    rules = families.tensor_rules(cfg, kind, {name: tensor.shape for name, tensor in state.items()})
    return {name: tensor for rule in rules for name, tensor in families.to_hub(rule, state, cfg).items()}


def files(model: LLM, export: Callable[..., None]) -> dict[str, Callable[[Path], Any]]:
    """Return the files of a run and their writers: a folder of Hugging Face, or weights in our format if no family has the settings
    of the model."""
    original = _source_config(model.folder) or _token_ids(model)
    try:
        config = families.hub_config(model.cfg, torch.float32, original)
    except CheckpointError:
        return {_FILE: export}
    config |= {key: original[key] for key in _TOKENS if key in original}
    writers: dict[str, Callable[[Path], Any]] = {_FILE: partial(_export, model.cfg, config["model_type"], export)}
    writers[families.CONFIG] = lambda path: _write_json(path, config)
    if (generation := _generation_config(model.folder, original)) is not None:
        writers[_GENERATION] = lambda path: _write_json(path, generation)
    return writers


def model_family(model: LLM) -> str:
    """Return the family whose names the files of a model have: that of its folder, or the first with its settings, or OURS."""
    try:
        return str(families.hub_config(model.cfg, torch.float32, _source_config(model.folder))["model_type"])
    except CheckpointError:
        return families.OURS


def _export(cfg: LLMConfig, kind: str, export: Callable[..., None], path: Path) -> None:
    """Write weights of a run under the names of ``kind``, one rule at a time."""
    if not families.family(kind)["names"]:
        export(path)
        return
    ours = path.with_name(f"{path.name}.ours")
    export(ours)
    try:
        stored = open_tensors(ours)
        rules = families.tensor_rules(cfg, kind, {name: tensor.size for name, tensor in stored.items()})

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for rule in rules:
                yield from families.to_hub(rule, {name: read_full(stored[name]) for name in rule.ours}, cfg).items()

        write_tensors(path, tensors)
    finally:
        ours.unlink()


def _source_config(folder: str | Path | None) -> dict[str, Any]:
    path = None if folder is None else Path(folder) / families.CONFIG
    return read_object(path, "settings as transformers writes them") if path is not None and path.is_file() else {}


def _token_ids(model: LLM) -> dict[str, Any]:
    """Return the ids of the special tokens of the tokenizer that was set, as config.json has them."""
    tokenizer = vars(model).get("_tokenizer")
    ids = {} if tokenizer is None else {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos}
    return {key: value for key, value in ids.items() if value is not None}


def _generation_config(folder: str | Path | None, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return generation_config.json of a folder, or one with the token ids of ``config``; None if there are none."""
    path = None if folder is None else Path(folder) / _GENERATION
    if path is not None and path.is_file():
        return read_object(path, "settings of generation as transformers writes them")
    ids = {key: config[key] for key in _TOKENS if config.get(key) is not None}
    return ids or None


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def resolve_run(path: Path) -> Path:
    """Return the weights file of a run, which has the settings, or else ``path``. Raises ConfigError for a folder of adapters."""
    for adapter in (path / "adapter", path):
        if (adapter / "adapter_config.json").is_file() and not (path / families.CONFIG).exists() and not (path / _FILE).exists():
            base = read_object(adapter / "adapter_config.json", "settings of an adapter").get("base_model_name_or_path") or "BASE"
            raise ConfigError(f"{path}: holds adapters of a model: give weights={base} adapter={adapter}, or merge them first")
    return path / _FILE if path.is_dir() and not (path / families.CONFIG).exists() and (path / _FILE).exists() else path


def read_settings(path: str | Path) -> LLMConfig:
    """Read the settings of a model without its weights, from all that ``load_weights`` accepts, and log layers that it lacks."""
    path = resolve_run(Path(path))
    settings = families.read_config(path) if path.is_dir() else weights.read_settings(path, "llm", LLMConfig)
    if settings is None:
        raise CheckpointError(f"{path}: weights without settings; give the folder that has {families.CONFIG} beside them")
    without = settings.model_copy(update={"mtp_layers": 0})
    if not settings.mtp_layers or not path.is_dir() or any(_is_prediction_layer(name, without) for name in _open_files(path)):
        return settings
    logger.warning("%s: no tensors of the %d layers of multi-token prediction in %s", path, settings.mtp_layers, families.CONFIG)
    return without


# ---- tensors


def _open_weights(path: Path, cfg: LLMConfig) -> dict[str, Lazy]:
    """Open the weights of a folder, or of a file of ours, by names of parameters and buffers. Raises CheckpointError for tensors
    that are missing, unexpected or no floating-point numbers, or a wrong index."""
    if path.is_dir() and not (path / _FILE).exists() and not (path / _INDEX).exists() and any(path.glob("*.bin")):
        command = f"python -c \"import transformers as t; t.AutoModelForCausalLM.from_pretrained('{path}').save_pretrained('OUT')\""
        raise CheckpointError(f"{path}: weights are pickled (*.bin), which hpcai does not read; convert them with: {command}")
    opened = _open_files(path)
    if "score.weight" in opened and not cfg.tied:  # the head for the classification of sequences
        opened["lm_head.weight"] = opened.pop("score.weight")
    kind = str(_source_config(path)["model_type"]) if path.is_dir() else families.OURS
    shapes = {name: tensor.size for name, tensor in opened.items()}
    weights.check_claims(path / families.CONFIG if path.is_dir() else path, cfg, shapes, families.family(kind)["keys"])
    with torch.device("meta"):
        sizes = {name: tuple(tensor.shape) for name, tensor in LLM(cfg).state_dict().items()}
    rules, prefix = families.tensor_rules(cfg, kind, sizes), families.family(kind).get("prefix", "")
    stored = dict(_known(opened, prefix, rules, cfg, path))
    copies = {rule.theirs[0]: rule.ours[0] for rule in rules if rule.form == "copy"}
    rules = [rule for rule in rules if rule.form != "copy"]
    if missing := [name for rule in rules for name in rule.theirs if name not in stored]:
        others = f", nor {len(missing) - 1} others" if missing[1:] else ""
        raise CheckpointError(f"{path}: has no {missing[0]}{others}; is {families.CONFIG} that of these weights?")
    for tensor in stored.values():
        if isinstance(tensor, LazyTensor) and tensor.dtype not in _FLOATS:
            raise CheckpointError(f"{tensor.path}: {tensor.key} is {tensor.dtype}, expected {', '.join(sorted(_FLOATS))}")
    tensors = {name: tensor for rule in rules for name, tensor in families.views(rule, stored.__getitem__, cfg, sizes).items()}
    tensors["model.mtp.embed_tokens.weight"] = embedding = tensors["model.embed_tokens.weight"]
    if cfg.tied:
        tensors["lm_head.weight"] = embedding
        copies["lm_head.weight"] = "model.embed_tokens.weight"
    for copy, name in copies.items():
        if copy in opened and not torch.equal(read_full(opened[copy]), read_full(tensors[name])):
            setting = "tie_word_embeddings to false" if copy == "lm_head.weight" else "num_nextn_predict_layers to 0"
            advice = f"set {setting} in {families.CONFIG} if it is a weight of its own"
            raise CheckpointError(f"{path}: {copy} differs from {name}; {advice}")
    return tensors


def _open_files(path: Path) -> dict[str, LazyTensor]:
    return open_tensors(path if not path.is_dir() or (path / _INDEX).exists() else path / _FILE)


def _has_value_head(path: Path) -> bool:
    opened = _open_files(path)
    return any(name in opened and opened[name].size[0] == 1 for name in ("score.weight", "lm_head.weight"))


def _known(
    opened: Mapping[str, LazyTensor], prefix: str, rules: list[families.Rule], cfg: LLMConfig, path: Path
) -> Iterator[tuple[str, Lazy]]:
    """Yield the tensors of the files by their names in ``rules``. Raises CheckpointError for an unexpected tensor."""
    expected = {name for rule in rules for name in rule.theirs}
    for name, tensor in opened.items():
        if _UNUSED.fullmatch(name) or (cfg.tied and name == "lm_head.weight") or _is_prediction_layer(name, cfg):
            continue
        full = name if name in expected else prefix + name  # old files of GPT-2 have no prefix
        if full in expected:
            yield full, tensor
        elif name.endswith("_scales") and name.removesuffix("_scales") in expected:
            blocks = opened.get(name.removesuffix("_scales") + "_blocks")
            if blocks is None:
                raise CheckpointError(f"{path}: has {name}, but not its blocks; fetch or save the folder again")
            yield name.removesuffix("_scales"), TransposedView(Mxfp4View(blocks, tensor))
        elif not (name.endswith("_blocks") and name.removesuffix("_blocks") in expected):
            question = f"is {families.CONFIG} that of these weights?"
            raise CheckpointError(f"{path}: has {name}, which no module of the settings has; {question}")


def _is_prediction_layer(name: str, cfg: LLMConfig) -> bool:
    """Whether a tensor is not read: of a layer of multi-token prediction that the settings do not have."""
    match = re.match(r"model\.(mtp\.)?layers\.(\d+)\.", name)
    if match is None or not (match[1] or cfg.latent):
        return name == "model.mtp.embed_tokens.weight"  # a copy
    return int(match[2]) >= (cfg.mtp_layers if match[1] else cfg.total_layers)
