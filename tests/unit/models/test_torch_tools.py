"""Every model under torch's own tools (docs/parallel.md): transforms of torch.func, copies, wrappers, compiler and export."""

import copy
import pickle
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore, destroy_process_group, init_process_group
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call, grad, grad_and_value, jvp, stack_module_state, vjp, vmap
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

from hpcai.errors import ConfigError
from hpcai.models.cosmoflow import CosmoFlow, CosmoFlowConfig
from hpcai.models.deepcam import DeepCam, DeepCamConfig
from hpcai.models.diffusion import Condition
from hpcai.models.dimenet.graph import collate
from hpcai.models.llm import LLM, LLMConfig
from hpcai.models.openfold import loss
from hpcai.models.unet3d import UNet3D, UNet3DConfig
from hpcai.nn.conv import Conv3d
from hpcai.nn.matmul import convert_to_float8
from tests import proteins
from tests.atoms import random_network, random_structure
from tests.ranks.language_model import GPT, LLAMA
from tests.ranks.test_diffusion_transformers import new_model
from tests.unit.models.diffusion.test_unet import new_unet, randn
from tests.unit.models.openfold.test_model import ALL, network

TOKENS, TIMES = torch.arange(12).reshape(2, 6), torch.tensor([0.1, 0.7], dtype=torch.float64)
TEXT = Condition(tokens=randn(2, 3, 5), pooled=randn(2, 3), guidance=TIMES)
XL = Condition(tokens=randn(2, 3, 6), pooled=randn(2, 3), sizes=torch.arange(12).view(2, 6))
# The network, and the arguments of its call; activation recomputation where a model has it
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "cosmoflow": (lambda: CosmoFlow(CosmoFlowConfig(size=8, blocks=2, filters=2)).eval(), (randn(2, 4, 8, 8, 8),)),
    "deepcam": (lambda: DeepCam(DeepCamConfig(divide=16, middle=1)).eval(), (randn(2, 16, 32, 32),)),
    "unet3d": (lambda: UNet3D(UNet3DConfig(filters=(4, 6), window=(8, 8, 8))), (randn(2, 1, 8, 8, 8),)),
    "dimenet": (random_network, (collate([random_structure(0), random_structure(1)]),)),
    "openfold": (lambda: proteins.without_dropout(network(checkpoint=True)), (proteins.random_batch([8]),)),
    "llama": (lambda: LLM(LLMConfig(**LLAMA)), (TOKENS, TOKENS, None, TOKENS // 4)),
    "gpt": (lambda: LLM(LLMConfig(**{**GPT, "recompute": "layers"})), (TOKENS,)),
    "dit": (lambda: new_model("dit"), (randn(2, 2, 4, 4), TIMES, Condition(classes=torch.tensor([0, 2])))),
    "flux": (lambda: new_model("flux, guided"), (randn(2, 2, 4, 4), TIMES, TEXT)),
    "sd3": (lambda: new_model("sd3"), (randn(2, 2, 4, 4), TIMES, TEXT._replace(guidance=None))),
    "sdxl": (lambda: new_unet(kind="cross", transformer_layers=(1, 2), pooled=3, sizes=4), (randn(2, 2, 4, 4), TIMES, XL)),
    "unet": (lambda: new_unet(kind="cross", recompute="layers"), (randn(2, 2, 4, 4), TIMES, Condition(tokens=randn(2, 3, 6)))),
}  # fmt: skip
TOOLS: dict[str, Callable[[Any, Any], Any]] = {
    "copy.deepcopy": lambda model, _: copy.deepcopy(model),
    "pickle": lambda model, _: pickle.loads(pickle.dumps(model)),  # noqa: S301
    "DistributedDataParallel": lambda model, _: DistributedDataParallel(model),
    "fully_shard": lambda model, _: fully_shard(copy.deepcopy(model).to(memory_format=torch.contiguous_format)),
    "torch.compile": lambda model, _: torch.compile(model, backend="eager"),
    "torch.export": lambda model, args: torch.export.export(model, args, strict=False).module(),
}
QUICK = [(name, tool) for tool in TOOLS for name in MODELS if "torch" not in tool or name in ("cosmoflow", "dit")]
CLAIMS = [pytest.param(name, tool, marks=pytest.mark.claim) for tool in TOOLS for name in MODELS if (name, tool) not in QUICK]


def build(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    model = MODELS[name][0]().double()
    for parameter in model.parameters():
        _ = parameter.any() or nn.init.normal_(parameter, std=0.1)
    return model, MODELS[name][1]


def loss_of(call: Callable[..., Any], args: Any) -> Any:
    """Return a number that depends on all outputs."""
    outputs = call(*args)
    outputs = loss(lambda _: outputs, args[0], ALL)["loss"] if isinstance(args[0], dict) else outputs
    return sum(y.square().mean() for y in tree_leaves(outputs) if isinstance(y, Tensor) and y.is_floating_point())


def gradients(model: Any, args: Any) -> tuple[Tensor, Tensor]:
    """Return the loss, and the gradients of all parameters as one tensor."""
    value = loss_of(model, args)
    grads = torch.autograd.grad(value, list(model.parameters()), allow_unused=True, materialize_grads=True)
    return value.detach(), flatten(grads)


def flatten(tensors: Any) -> Tensor:
    return torch.cat([x.flatten() for x in tensors])


def check_close(actual: Tensor, expected: Tensor) -> None:
    assert_close(actual, expected, rtol=1e-6, atol=1e-11 * float(expected.abs().max()))


@pytest.fixture
def one_rank() -> Iterator[None]:
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("name", "tool"), [*QUICK, *CLAIMS])
def test_a_tool_of_torch_changes_no_loss_and_no_gradient(name: str, tool: str) -> None:
    model, args = build(name)
    expected = gradients(model, args)
    if (name, tool) == ("dimenet", "torch.export"):
        with pytest.raises(ConfigError, match=r"torch\.export cannot record forces"):
            TOOLS[tool](model, args)
        return
    changed = TOOLS[tool](model, args)
    loss_of(changed, args).backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in changed.parameters()]
    check_close(loss_of(changed, args).detach(), expected[0])
    check_close(flatten(getattr(grad, "full_tensor", lambda grad=grad: grad)() for grad in grads), expected[1])


@pytest.mark.parametrize("name", MODELS)
def test_transforms_agree_with_the_backward_pass(name: str) -> None:
    model, args = build(name)
    value, expected = gradients(model, args)
    p = {key: parameter.detach() for key, parameter in model.named_parameters()}
    v = {key: torch.randn_like(parameter) for key, parameter in p.items()}

    def f(parameters: Any, buffers: Any = MappingProxyType({})) -> Any:
        return loss_of(lambda *args: functional_call(model, {**parameters, **buffers}, args), args)

    check_close(flatten(grad(f)(p).values()), expected)
    check_close(flatten(vjp(f, p)[1](torch.ones_like(value))[0].values()), expected)
    check_close(jvp(f, (p,), (v,))[1], expected @ flatten(v.values()))
    forward_over_reverse = jvp(grad(f), (p,), (v,))[1]
    reverse_over_reverse = grad(lambda p: flatten(grad(f)(p).values()) @ flatten(v.values()))(p)
    check_close(flatten(forward_over_reverse.values()), flatten(reverse_over_reverse.values()))
    stacked, buffers = stack_module_state([model, model])  # type: ignore[arg-type]
    grads, values = vmap(grad_and_value(f))({key: x.detach() for key, x in stacked.items()}, buffers)
    check_close(values, value.expand(2))
    check_close(flatten(x[1] for x in grads.values()), expected)


def test_volumes_in_float32_are_transformed_too() -> None:
    conv, x = Conv3d(3, 4, 3, padding=1), randn(1, 3, 6, 6, 6).float()  # by oneDNN in the backward pass
    weight_grad = torch.autograd.grad(conv(x).square().sum(), conv.weight)[0]
    assert_close(grad(lambda w: functional_call(conv, {"weight": w}, (x,)).square().sum())(conv.weight.detach()), weight_grad)


def test_a_function_that_cannot_be_transformed_says_so() -> None:
    convert_to_float8(layer := nn.Linear(16, 16), "layer")
    with pytest.raises(ConfigError, match="cannot transform _FusedMatmul; transform a model without parallelize and FP8"):
        grad(lambda x: layer(x).sum())(torch.ones(16, 16))
