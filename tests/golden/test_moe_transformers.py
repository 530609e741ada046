"""Mixture-of-experts layers of transformers and ours have equal outputs and gradients, in float64."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from hpcai.nn.moe import Experts, MoE, Router

_WHY = "transformers is not installed: mixture-of-experts layers are NOT compared with it; pip install hpcai-suite[peers]"
transformers: Any = pytest.importorskip("transformers", reason=_WHY)

C, INNER, E, K = 16, 24, 8, 3
FAMILIES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {  # module, layer, settings of theirs and of our router
    "Mixtral": ("mixtral", "SparseMoeBlock", {"num_local_experts": E, "intermediate_size": INNER}, {}),
    "Qwen2Moe": ("qwen2_moe", "SparseMoeBlock", {"num_experts": E, "shared_expert_intermediate_size": 20}, {"normalize": False}),
    "DeepseekV3": ("deepseek_v3", "MoE", {"n_routed_experts": E, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
                   {"score": "sigmoid", "groups": 4, "top_groups": 2, "scale": 2.5, "correction": True}),
    "GptOss": ("gpt_oss", "MLP", {"num_local_experts": E, "intermediate_size": INNER},
               {"score": "softmax_after_topk", "bias": True}),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_equal_those_of_transformers(family: str, quiet_hugging_face: None) -> None:
    module_name, layer, settings, routing = FAMILIES[family]
    settings = {"hidden_size": C, "num_experts_per_tok": K, "moe_intermediate_size": INNER} | settings
    module, is_gpt_oss = import_module(f"transformers.models.{module_name}.modeling_{module_name}"), family == "GptOss"
    torch.manual_seed(0)
    theirs = getattr(module, family + layer)(getattr(transformers, f"{family}Config")(**settings)).double()
    for tensor in (*theirs.parameters(), *theirs.buffers()):
        nn.init.normal_(tensor, 0.0 if isinstance(tensor, nn.Parameter) else -2.0, 0.5)  # corrected scores are below 0
    experts = Experts(C, INNER, E, bias=is_gpt_oss, activation="clipped_swiglu" if is_gpt_oss else "swiglu")
    shared = getattr(theirs, "shared_expert", None) or getattr(theirs, "shared_experts", None)
    ours = MoE(Router(C, E, K, **routing), experts, shared, getattr(theirs, "shared_expert_gate", None)).double()

    def convert(tensors: dict[str, Any]) -> dict[str, Tensor]:
        """Return tensors of our names, split as ours, from those of transformers."""
        result = {}
        for name, x in tensors.items():
            x = x.mT if is_gpt_oss and x.ndim == 3 else x
            name = name.replace("router.", "gate.").replace("shared_experts.", "shared_expert.")
            halves = [x] if "gate_up" not in name else [x[:, ::2], x[:, 1::2]] if is_gpt_oss else x.chunk(2, 1)
            result |= zip((name.replace("gate_up", part) for part in ("gate", "up")), halves)
        return result

    ours.load_state_dict(convert(theirs.state_dict()))
    a, b = (x.requires_grad_() for x in torch.randn(2, 7, C).double().expand(2, 2, 7, C).clone())
    wide = SimpleNamespace(**vars(torch) | {"float32": torch.float64, "float": torch.float64})
    with patch.object(module, "torch", wide), patch.object(Tensor, "float", Tensor.double):  # it would route in float32
        expected = theirs(a)
    expected, actual, parameters = expected[0] if is_gpt_oss else expected, ours(b), dict(theirs.named_parameters())
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    grads = torch.autograd.grad(expected.sin().sum(), [a, *parameters.values()])
    grad, *rest = torch.autograd.grad(actual.sin().sum(), [b, *ours.parameters()])
    torch.testing.assert_close(grad, grads[0], rtol=0, atol=1e-12)
    named = dict(zip(dict(ours.named_parameters()), rest))
    torch.testing.assert_close(named, convert(dict(zip(parameters, grads[1:]))), rtol=0, atol=1e-12)
