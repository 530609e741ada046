"""OpenFold: batches, padding, chunks and checkpointing change no result; precision, dropout, losses, initialization."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcai import dist
from hpcai.kernels import chunking
from hpcai.models.openfold import OpenFold, OpenFoldConfig, embedders, loss
from hpcai.models.openfold import objective as objectives
from hpcai.models.openfold.config import ObjectiveConfig
from hpcai.models.openfold.layers import Dropout
from hpcai.models.openfold.objective import loss_terms, weighted_total
from hpcai.settings import StepConfig
from hpcai.train import Step
from tests import proteins
from tests.proteins import without_dropout

ALL = ObjectiveConfig(resolved=0.01, violation=1.0, aligned_error=0.1)
network = partial(proteins.random_network, heads={"plddt": 16, "tm": True})


def gradients(model: OpenFold, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model.zero_grad()
    values = loss(model, batch, ALL)
    values["loss"].backward()
    return values, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_a_batch_is_the_mean_of_its_proteins() -> None:
    """The published code sums periodic torsions over the batch, and takes a mean of lengths."""
    model, batch = without_dropout(network()), proteins.random_batch([14, 14])
    batch["seq_length"][1] = 5  # another length
    values, grads = gradients(model, batch)
    parts = [gradients(model, {name: value[i : i + 1] for name, value in batch.items()}) for i in range(2)]
    for name, value in values.items():
        assert value.item() == pytest.approx(np.mean([part[0][name].item() for part in parts]), rel=1e-9), name
    for name, grad in grads.items():
        torch.testing.assert_close(grad, torch.stack([part[1][name] for part in parts]).mean(0), rtol=1e-6, atol=1e-9)


def test_padding_changes_nothing() -> None:
    model = without_dropout(network())
    cfg = proteins.SMALL.model_copy(update={"crop": 20})
    alone, padded = proteins.random_batch([14]), proteins.random_batch([14], cfg)
    outputs = [model(x) for x in (alone, padded)]
    torch.testing.assert_close(outputs[1].positions[:, :14], outputs[0].positions, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(outputs[1].logits.distogram[:, :14, :14], outputs[0].logits.distogram, rtol=1e-6, atol=1e-6)
    losses = [loss(model, x, ALL)["loss"].item() for x in (alone, padded)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_activation_checkpointing_gives_the_same_gradients() -> None:
    batch = proteins.random_batch([12])
    values, grads = gradients(without_dropout(network()), batch)
    model, calls = without_dropout(network(checkpoint=True)), []
    for stack in ("evoformer", "extra_msa_stack", "template_embedder.template_pair_stack"):
        block = model.get_submodule(f"{stack}.blocks.0")
        block.register_forward_pre_hook(lambda layer, _: calls.append(layer))
    recomputed, recomputed_grads = gradients(model, batch)
    assert len(calls) == 3 * 3, "in the first pass, in the last one, and in the backward pass"
    assert recomputed["loss"].item() == pytest.approx(values["loss"].item(), rel=1e-12) and grads.keys() == recomputed_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(recomputed_grads[name], grad, rtol=1e-9, atol=1e-12)


def test_only_the_last_pass_has_gradients() -> None:
    model, batch = without_dropout(network()), proteins.random_batch([12], passes=3)
    passes: list[bool] = []
    model.structure_module.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    loss(model, batch)["loss"].backward()
    assert passes == [False, False, True]
    with torch.no_grad():
        model(batch)
    assert passes[3:] == [False] * 3


@pytest.mark.parametrize("shared", [1, 2])
def test_dropout_is_shared(shared: int) -> None:
    torch.manual_seed(0)
    mask = Dropout(0.25, shared)(torch.ones(2, 40, 50, 8), torch.zeros(2, 40, 50, 8)) != 0
    assert (mask == mask.select(shared, 0).unsqueeze(shared)).all() and 0.7 < mask.float().mean() < 0.8
    assert (Dropout(0.25, shared).eval()(torch.ones(3), torch.ones(3)) == 2).all()


def test_dropout_add_is_fused() -> None:
    def added(x: Tensor, residual: Tensor) -> Tensor:
        torch.manual_seed(1)
        return Dropout(0.25, 1)(x, residual)

    x, residual = (torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(added, (x.transpose(1, 2), residual.transpose(1, 2)))
    narrow = x.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        actual = added(narrow, residual.detach().float())
    torch.testing.assert_close(actual, added(narrow.detach().double(), residual.detach()).float(), rtol=1e-6, atol=1e-6)
    actual.sum().backward()
    assert actual.dtype == torch.float32 and narrow.grad is not None and narrow.grad.dtype == torch.bfloat16


def test_distances_in_chunks_of_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = without_dropout(network()), proteins.random_batch([11])
    results = []
    for size in (1 << 30, 20_000):
        monkeypatch.setattr(objectives, "_CPU", size)
        results.append(gradients(model, batch))
    assert results[1][0]["fape"].item() == pytest.approx(results[0][0]["fape"].item(), rel=1e-12)
    for name, grad in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], grad, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("precision", ["bf16", "bf16-params"])
def test_structures_heads_and_losses_are_float32(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = network(torch.float32), proteins.random_batch([12], dtype=torch.float32)
    coarse, exact = "evoformer.blocks.0.pair.pair_transition", ("ipa", "bb_update", "angle_resnet.linear_out")
    dtypes, bin_dtypes, bins = dict[str, torch.dtype](), list[torch.dtype](), embedders.distogram
    for name in (coarse, "heads.plddt", "heads.distogram", *(f"structure_module.{part}" for part in exact)):
        part = model.get_submodule(name)
        part.register_forward_hook(lambda _, __, out, name=name: dtypes.__setitem__(name, out.dtype))
    monkeypatch.setattr(embedders, "distogram", lambda x, *args: bin_dtypes.append(x.dtype) or bins(x, *args))  # type: ignore[func-returns-value]
    step = Step(model, partial(loss, cfg=ALL), StepConfig(precision=precision, optimizer="sgd", lr=1e-9), dist.single_process())
    values = step(batch)
    assert dtypes.pop(coarse) == torch.bfloat16
    assert len(dtypes) == 5 and {*dtypes.values(), *(value.dtype for value in values.values())} == {torch.float32}
    assert len(bin_dtypes) == 4 and set(bin_dtypes) == {torch.float32}, "template and recycled"
    bf16 = {name for name, p in model.named_parameters() if p.dtype == torch.bfloat16}
    assert not any(name.startswith(("structure_module", "heads")) for name in bf16) and bool(bf16) == (precision == "bf16-params")


@torch.no_grad()
def test_chunks_give_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients, intermediates of many values per pair are computed in chunks."""
    model, batch = network().eval(), proteins.random_batch([14, 14])
    full, counts, original = model(batch), list[int](), chunking.chunk_size
    monkeypatch.setattr(chunking, "chunk_size", lambda x, each, cpu: counts.append(original(x, each, 2000)) or counts[-1])  # type: ignore[func-returns-value]
    chunked = model(batch)
    assert len(counts) > 40 > max(counts)
    for name in ("msa", "pair", "single", "positions"):
        torch.testing.assert_close(getattr(chunked, name), getattr(full, name), rtol=1e-11, atol=1e-11)


def test_terms_without_weight_are_skipped_and_the_loss_scales_with_the_root_of_the_length() -> None:
    model, batch, cfg = without_dropout(network()), proteins.random_batch([12]), ObjectiveConfig()
    last = {name: value[..., -1] for name, value in batch.items()}
    last["seq_length"] = torch.tensor([100])  # the crop has 12 of them
    terms = loss_terms(model(batch), last, cfg)
    assert set(terms) == {"fape", "chi", "distogram", "masked_msa", "plddt"}
    weighted = sum(getattr(cfg, name) * term for name, term in terms.items())
    assert weighted_total(terms, last, cfg).item() == pytest.approx(12**0.5 * weighted.item())  # type: ignore[union-attr]


def test_pairs_are_updated_in_the_published_order_with_the_published_dropout() -> None:
    model, batch = network(), proteins.random_batch([12], passes=1)
    calls: dict[str, list[str]] = {}
    for name, layer in model.named_modules():
        if name.endswith(("drop_rows", "drop_columns", "tri_mul_out", "tri_mul_in", "tri_att_start", "tri_att_end")):
            block, _, leaf = name.rpartition(".")
            layer.register_forward_hook(lambda *_, block=block, leaf=leaf: calls.setdefault(block, []).append(leaf))
    model(batch)
    multiply = ["tri_mul_out", "drop_columns", "tri_mul_in", "drop_columns"]
    attend = ["tri_att_start", "drop_columns", "tri_att_end", "drop_rows"]
    assert calls["evoformer.blocks.1.pair"] == calls["extra_msa_stack.blocks.0.pair"] == multiply + attend
    assert calls["template_embedder.template_pair_stack.blocks.0"] == attend + multiply
    assert calls["evoformer.blocks.0"] == ["drop_rows"]


def test_confidence_is_learned_at_known_resolution_only() -> None:
    model, batch = without_dropout(network()), proteins.random_batch([12])
    for resolution, counts in ((0.0, False), (0.1, True), (3.0, True), (3.1, False)):
        batch["resolution"] = torch.full_like(batch["resolution"], resolution)
        values = loss(model, batch, ALL)
        assert (values["plddt"] > 0) == (values["resolved"] > 0) == (values["aligned_error"] > 0) == counts


def test_initialization_is_as_published() -> None:
    model = OpenFold(OpenFoldConfig.preset("initial", blocks=1, extra={"blocks": 1}))
    transition = model.evoformer.blocks[0].msa_transition
    weight, deviation = transition.linear_1.weight, (2 / 256) ** 0.5
    assert weight.std().item() == pytest.approx(deviation, rel=0.01) and weight.abs().max() <= 2 * deviation / 0.8796
    assert not transition.linear_2.weight.any()
