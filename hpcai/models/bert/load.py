"""Read and write BERT as folders of Hugging Face, and read its checkpoints of TensorFlow."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcai.errors import CheckpointError, ConfigError
from hpcai.json_file import check_fields, read_object
from hpcai.models.bert.config import BertConfig
from hpcai.models.bert.model import Bert
from hpcai.nn import weights
from hpcai.nn.safetensors_files import open_tensors, read_full, save_sharded, write_tensors

CONFIG, FILE = "config.json", "model.safetensors"
_TIED = "cls.predictions.weight", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"
_UNUSED = {"embeddings.position_ids", "bert.embeddings.position_ids"}  # a buffer in older files
_SKIPPED = {"global_step", "adam_m", "adam_v", "LAMB", "LAMB_1", "beta1_power", "beta2_power"}  # state of the optimizer
_KEYS = {  # of config.json
    "vocabulary": "vocab_size", "width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
    "inner": "intermediate_size", "positions": "max_position_embeddings", "types": "type_vocab_size", "activation": "hidden_act",
    "dropout": "hidden_dropout_prob", "attention_dropout": "attention_probs_dropout_prob", "eps": "layer_norm_eps",
    "deviation": "initializer_range",
}  # fmt: skip
_FIXED = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False, "tie_word_embeddings": True}


def load_weights(path: str | Path, cfg: BertConfig | None = None) -> Bert:
    """Load a model in evaluation mode. The format is detected:

    - a folder of Hugging Face (config.json and safetensors), or of a run;
    - safetensors or a torch state dict with those names, from hpcai with settings, or beside a config.json;
    - variables of a TensorFlow checkpoint in a NumPy file (.npz).

    ``cfg`` gives the settings that files lack, such as heads. With a larger vocabulary than that of the file, such as a multiple of
    8, the further entries are zero (MLPerf). Weights of the encoder alone get new heads for masked tokens. Raises CheckpointError
    if weights are missing or do not fit, ConfigError for a model that BERT is not.
    """
    path = Path(path)
    if path.is_dir():
        saved: BertConfig | None = read_config(path)
        file = path if (path / f"{FILE}.index.json").exists() else path / FILE
        state = {name: read_full(tensor) for name, tensor in open_tensors(file).items()}
    else:
        state, saved = weights.load_state(path, "bert", BertConfig)
        if saved is None and (path.parent / CONFIG).is_file():
            saved = read_config(path.parent)
    state = dict(_our_names(state))
    with weights.check_names(path, state, "of Hugging Face (bert.embeddings.word_embeddings.weight)"):
        sizes = _infer_sizes(state)
    base = cfg or saved or BertConfig().model_copy(update=sizes)
    vocabulary = base.vocabulary
    base = base.model_copy(update={"nsp": sizes["nsp"]} if cfg is None else {})
    ours = base.model_dump() | {"vocabulary": sizes["vocabulary"] if cfg is not None else vocabulary}
    weights.check_sizes(path, sizes, ours)
    for name in ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias"):
        if name in state and (more := vocabulary - len(state[name])) > 0:
            state[name] = torch.cat((state[name], state[name].new_zeros(more, *state[name].shape[1:])))
        elif name in state and more < 0:
            raise CheckpointError(f"{path}: {len(state[name])} tokens, the settings have {vocabulary}; set vocabulary to them")
    model = Bert(base)
    if "cls.predictions.bias" not in state:
        state = {name: tensor for name, tensor in model.state_dict().items() if name.startswith("cls.predictions.")} | state
    state["cls.predictions.weight"] = state["bert.embeddings.word_embeddings.weight"]
    return weights.load_into(model, state, path)


def read_config(folder: Path) -> BertConfig:
    """Read the settings from config.json. Raises ConfigError for a setting that BERT here does not compute."""
    path, expected = folder / CONFIG, "settings as transformers writes them"
    config = read_object(path, expected)
    if config.get("model_type", "bert") != "bert":
        raise ConfigError(f"{path}: a model of type {config['model_type']!r}; expected 'bert'")
    for key, value in _FIXED.items():
        if config.get(key, value) != value:
            raise ConfigError(f"{path}: {key} is {config[key]!r}; hpcai computes {value!r} only")
    values = {name: config[key] for name, key in _KEYS.items() if key in config}
    if values.get("activation") == "gelu_new":
        values["activation"] = "gelu_pytorch_tanh"
    with check_fields(path, expected, keys=_KEYS):
        return BertConfig(**values)


def save_folder(state: Mapping[str, Tensor], cfg: BertConfig, folder: str | Path, shard: int = 5_000_000_000) -> None:
    """Write weights and settings as a folder of Hugging Face, in safetensors files of at most ``shard`` bytes."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: tensor.contiguous() for name, tensor in state.items() if name not in _TIED}
    save_sharded(kept, folder, FILE, shard, {"format": "pt"})
    _write_config(cfg, folder / CONFIG)


def files(model: Bert, export: Callable[..., None]) -> dict[str, Callable[[Path], Any]]:
    """Return the files of a run and their writers."""
    return {FILE: partial(_export, export), CONFIG: partial(_write_config, model.cfg)}


def _export(export: Callable[..., None], path: Path) -> None:
    ours = path.with_name(f"{path.name}.ours")
    export(ours)
    try:
        stored = open_tensors(ours)
        write_tensors(path, lambda: ((name, read_full(tensor)) for name, tensor in stored.items() if name not in _TIED))
    finally:
        ours.unlink()


def _write_config(cfg: BertConfig, path: Path) -> None:
    kind = "BertForPreTraining" if cfg.nsp else "BertForMaskedLM"
    config = {key: getattr(cfg, name) for name, key in _KEYS.items()} | {"model_type": "bert", "architectures": [kind]}
    path.write_text(json.dumps(config, indent=2) + "\n")


def _our_names(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights under the names of parameters."""
    encoder_only = not any(name.startswith(("bert.", "bert/", "cls")) for name in state)
    for name, tensor in state.items():
        parts = re.sub(r"layer_(\d+)", r"layer/\1", name).split("/")
        if _SKIPPED & set(parts) or name in _TIED or name in _UNUSED:
            continue
        if parts[-1] == "kernel":
            tensor = tensor.T
        full = ".".join(parts)
        for pattern, ours in (
            (r"\.(kernel|gamma|output_weights)$", ".weight"), (r"_embeddings$", "_embeddings.weight"),
            (r"\.(beta|output_bias)$", ".bias"),
        ):  # fmt: skip
            full = re.sub(pattern, ours, full)
        yield f"bert.{full}" if encoder_only else full, tensor


def _infer_sizes(state: Mapping[str, Tensor]) -> dict[str, Any]:
    (vocabulary, width), prefix = state["bert.embeddings.word_embeddings.weight"].shape, "bert.encoder.layer."
    layers = {name.removeprefix(prefix).split(".")[0] for name in state if name.startswith(prefix)}
    inner = {} if not layers else {"inner": len(state[f"{prefix}0.intermediate.dense.weight"])}
    positions, types = (len(state[f"bert.embeddings.{name}_embeddings.weight"]) for name in ("position", "token_type"))
    nsp = "cls.seq_relationship.weight" in state
    sizes = {"vocabulary": vocabulary, "width": width, "layers": len(layers), "positions": positions, "types": types, "nsp": nsp}
    return sizes | inner
