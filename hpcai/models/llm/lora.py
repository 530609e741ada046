"""Low-rank adapters of a language model (Hu et al., "LoRA", 2021): y = W x + s B A x with frozen W.

    adapt(model, LoRAConfig(rank=16, alpha=32))     # after ``parallelize``; only A and B are trained
    save_adapter(model, folder)                     # in the format of peft
    merge(model)                                    # replaces W by W + s B A: a model without adapters
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcai.errors import CheckpointError
from hpcai.json_file import check_fields, read_object
from hpcai.models.llm.config import LLMConfig, LoRAConfig
from hpcai.models.llm.families import hub_modules, tensor_rules
from hpcai.models.llm.load import model_family
from hpcai.models.llm.model import LLM
from hpcai.nn.safetensors_files import open_tensors, save_sharded
from hpcai.parallel import lora
from hpcai.parallel.lora import adapt as adapt
from hpcai.parallel.lora import merge as merge

_FILE, _CONFIG, _PREFIX = "adapter_model.safetensors", "adapter_config.json", "base_model.model."
_PEFT: dict[str, Any] = json.loads(Path(__file__).with_name("peft.json").read_text(encoding="utf-8"))  # settings of its files
_DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64


def save_adapter(model: LLM, cfg: LoRAConfig, folder: str | Path, base: str = "") -> None:
    """Write the adapters of an unsharded model in the format of peft. ``base``: path of the base model."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors, config = _to_peft(dict(model.named_parameters()), cfg, model.cfg, model_family(model), base)
    save_sharded(tensors, folder, _FILE, 1 << 62)
    (folder / _CONFIG).write_text(config)


def files(model: LLM, export: Callable[..., None]) -> dict[str, Callable[[Path], Any]]:
    """Return the files of a run and their writers: the adapters, as ``save_adapter`` writes them."""
    from safetensors.torch import load_file

    cfg, origin = model.adapters, next((o for p in model.parameters() if (o := getattr(p, "origin", None))), "")
    like = dict(_without_memory(model.cfg, cfg).named_parameters())  # of all stages
    kind = model_family(model)
    config = _to_peft(like, cfg, model.cfg, kind, str(Path(origin).parent) if origin else "")[1]

    def write(path: Path) -> None:
        export(path, names=lambda name: name if ".adapter." in name or cfg.saves(name) else None)
        save_sharded(_to_peft(load_file(path), cfg, model.cfg, kind)[0], path.parent, path.name, 1 << 62)

    return {f"adapter/{_FILE}": write, f"adapter/{_CONFIG}": lambda path: path.write_text(config)}


def load_adapter(model: LLM, folder: str | Path) -> LoRAConfig:
    """Add the adapters in a folder of peft or ``save_adapter`` to ``model``, and return their settings. One of the output layer is
    added to its weights, which are trained whole. Raises CheckpointError or ConfigError for adapters of another model or type, or
    damaged ones; the model is then unchanged."""
    cfg, state = _from_peft(Path(folder), model.cfg, model_family(model))
    adapt(model, cfg)
    lora.load_tensors(model, state)
    return cfg


def read_adapter_config(folder: Path) -> LoRAConfig:
    """Read the settings in a folder of peft, but targets, with patterns that are regular expressions of names in its base model.
    Raises CheckpointError or ConfigError for other methods than LoRA and for variants of it."""
    path, expected = folder / _CONFIG, "settings of an adapter as peft writes them, with a peft_type"
    config = {"peft_type": "none"} | read_object(path, expected)
    for name, value in config.items():
        if value and name not in _PEFT["any value is read"] and value not in _PEFT["values that are read"].get(name, ()):
            problem = f"{name!r:.40} is {value!r:.40}{', which changes the weights of the base' * (name == 'init_lora_weights')}"
            raise CheckpointError(f"{path}: {problem}; expected a plain LORA; merge it into its base by peft (merge_and_unload)")
    with check_fields(path, expected, keys=_PEFT["keys"]):
        values = {field: config[key] for field, key in _PEFT["keys"].items() if config.get(key) is not None}
        cfg = LoRAConfig(**values | {"rank": config["r"], "alpha": config["lora_alpha"]})
        for pattern in cfg.alpha_pattern:
            if re.search(r"\)[*+{]|([*+{].*){5}", pattern):
                raise ValueError(f"{pattern!r:.80} repeats more than is searched for")
            re.compile(pattern)
        return cfg


# ---- names and tensors of peft


def _hub_names(cfg: LLMConfig, kind: str) -> tuple[dict[str, tuple[str, ...]], dict[str, str], dict[str, Tensor]]:
    """Return ``hub_modules``, the names here of tensors in the files that are equal, and all tensors, on the meta device."""
    untied, state = cfg.model_copy(update={"tied": False}), _without_memory(cfg).state_dict()
    sizes = {name: tensor.shape for name, tensor in state.items()}
    equal = {rule.theirs[0]: rule.ours[0] for rule in tensor_rules(untied, kind, sizes) if rule.form == "same"}
    return hub_modules(untied, kind, sizes), equal, state


def _without_memory(cfg: LLMConfig, lora: LoRAConfig | None = None) -> LLM:
    with torch.device("meta"):
        return adapt(LLM(cfg), lora) if lora else LLM(cfg)


def _to_peft(
    state: Mapping[str, Tensor], cfg: LoRAConfig, llm: LLMConfig, kind: str, base: str = ""
) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of peft, and its settings as JSON. Layers that are one in the base have one adapter, with their A stacked
    and their B on the diagonal."""
    modules, names, sizes = _hub_names(llm, kind)
    hub = {theirs: state[ours] for theirs, ours in names.items() if ours in state and cfg.saves(ours)}
    layers = dict[str, tuple[int, float]]()
    for name, ours in modules.items():
        if parts := {each: part for each in ours if (part := cfg.for_layer(each))}:
            first, down = next(iter(parts.values())), torch.cat([state[f"{each}.adapter.lora_A.weight"] for each in parts])
            ups = [state[f"{each}.adapter.lora_B.weight"] * (parts[each].scale / first.scale) if each in parts
                   else down.new_zeros(len(sizes[f"{each}.weight"]), 0) for each in ours]  # fmt: skip
            hub |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": torch.block_diag(*ups)}
            layers[name] = len(down), first.alpha_for(len(down))
    theirs = lora.with_layers(cfg, layers, modules)
    settings = _PEFT["written"] | {key: getattr(theirs, field) for field, key in _PEFT["keys"].items()} | {
        "target_modules": theirs.targets, "base_model_name_or_path": base, "fan_in_fan_out": any("c_attn" in x for x in modules),
        "modules_to_save": sorted({name.rpartition(".")[0] for name in hub if ".lora_" not in name}) or None,
    }  # fmt: skip
    return {f"{_PREFIX}{name}": tensor for name, tensor in hub.items()}, json.dumps(settings, indent=2) + "\n"


def _from_peft(folder: Path, llm: LLMConfig, kind: str) -> tuple[LoRAConfig, dict[str, Tensor]]:
    """Return settings and tensors under our names, the inverse of ``_to_peft``. The tensors tell which layers have adapters."""
    cfg, (modules, names, sizes) = read_adapter_config(folder), _hub_names(llm, kind)
    saved = {name.removeprefix(_PREFIX).replace(".base_layer.", "."): tensor[tuple(slice(None) for _ in tensor.size)]
             for name, tensor in open_tensors(folder / _FILE).items()}  # fmt: skip
    adapted = {name.partition(".lora_")[0] for name in saved if ".lora_" in name}
    layers, state = dict[str, tuple[int, float]](), dict[str, Tensor]()

    def take(name: str, *shape: int) -> Tensor:
        actual = "is missing"
        if (tensor := saved.pop(name, None)) is not None:
            if tensor.shape == shape and tensor.dtype in _DTYPES:
                return tensor
            actual = f"is {list(tensor.shape)} of {tensor.dtype}"
        expected = f"expected {list(shape)} of floating-point numbers; is it an adapter of this model?"
        raise CheckpointError(f"{folder}: {_PREFIX}{name} {actual}; {expected}")

    for name in sorted(modules.keys() & adapted):
        ours, shapes = modules[name], [sizes[f"{each}.weight"].shape for each in modules[name]]
        stored = saved.get(f"{name}.lora_A.weight", torch.empty(0)).numel() // shapes[0][1]
        rank = max(stored, 1) if cfg.rank_pattern else cfg.rank
        alphas = (value for pattern, value in cfg.alpha_pattern.items() if re.fullmatch(rf"(.*\.)?({pattern})", name))
        part = cfg.model_copy(update={"rank": rank, "alpha": next(alphas, cfg.alpha)})
        down = take(f"{name}.lora_A.weight", rank, shapes[0][1])
        ups = take(f"{name}.lora_B.weight", sum(n for n, _ in shapes), rank).split([n for n, _ in shapes])
        if f"{name}.weight" in saved:  # of the output layer, which peft saves beside its adapter
            saved[f"{name}.weight"] = take(f"{name}.weight", *shapes[0]) + part.scale * ups[0].to(down) @ down
            continue
        columns = torch.stack([up.any(0) for up in ups])
        if len(ups) == 1 or columns.sum(0).max() != 1:  # else ``_to_peft`` joined them, and each has columns of its own
            columns = torch.ones_like(columns)
        for each, up, own in zip(ours, ups, columns):
            if rank := int(own.sum()):
                layers[each] = rank, part.alpha_for(rank)
                state |= {f"{each}.adapter.lora_A.weight": down[own], f"{each}.adapter.lora_B.weight": up[:, own]}
    others = {ours: take(theirs, *sizes[ours].shape) for theirs, ours in names.items() if theirs in saved}
    if saved or not layers:
        problem = f"{next(iter(saved))} belongs to no linear layer of the model" if saved else "*.lora_A.weight is missing"
        raise CheckpointError(f"{folder}: {_PREFIX}{problem}; is it an adapter of this model? If it is, merge it by peft")
    cfg = lora.with_layers(cfg, layers, [each for ours in modules.values() for each in ours])
    return cfg.model_copy(update={"modules_to_save": tuple(sorted({name.rpartition(".")[0] for name in others}))}), state | others
