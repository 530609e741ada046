"""R-GAT: which hops and relations are computed, padding, the order of projection and sum, files of weights, errors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.testing import assert_close

from hpcai import dist
from hpcai.errors import CheckpointError, DataError
from hpcai.models import rgat
from hpcai.models.rgat import RGAT, Batch, RGATConfig
from hpcai.models.rgat import model as network
from hpcai.settings import StepConfig
from hpcai.train import Step
from tests.cpu_graph import CPUGraph
from tests.subgraphs import full_batch, random_batch

RELATIONS = "paper___cites___paper", "author___rev_written_by___paper", "paper___written_by___author", "paper___in___journal"
CFG = RGATConfig(features=5, hidden=6, heads=2, layers=2, relations=RELATIONS, num_classes=3, dropout=0.0)


def new_model(cfg: RGATConfig = CFG) -> RGAT:
    torch.manual_seed(0)
    return RGAT(cfg).double()


def make_batch(seed: int = 0, seeds: int = 6) -> Batch:
    return random_batch(seed, RELATIONS, 5, seeds)


def test_all_hops_in_every_layer_give_the_same_logits() -> None:
    model, batch = new_model(), make_batch()
    x = {kind: torch.cat(parts) for kind, parts in batch.features.items()}
    edges = {name: torch.cat(parts, 1) for name, parts in batch.edges.items()}
    labels = torch.full((len(x["paper"]),), -1)
    assert_close(model(batch), model(full_batch(x, edges, labels, 2))[: len(batch.labels)])


def gradients(model: RGAT, batch: Batch) -> dict[str, Tensor]:
    model.zero_grad()
    rgat.loss(model, batch)["loss"].backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("cost", [0, 1e9])
def test_projection_before_or_after_the_sum(cost: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = new_model(), make_batch()
    expected = gradients(model, batch)
    monkeypatch.setattr(network, "_EDGE_COST", cost)
    own = gradients(model, batch)
    assert own.keys() == expected.keys()
    for name in own:
        assert_close(own[name], expected[name], rtol=1e-10, atol=1e-12)


def test_padding_changes_nothing() -> None:
    model, batch = new_model(), make_batch()
    count = {kind: [len(part) for part in parts] for kind, parts in batch.features.items()}
    moved = {kind: torch.cat([torch.arange(n) + sum(sizes[:h]) + h for h, n in enumerate(sizes)]) for kind, sizes in count.items()}
    edges = {}
    for name, hops in batch.edges.items():
        source, _, destination = name.split("___")
        padded = []
        for hop, part in enumerate(hops):
            ends = [moved[source][part[0]], moved[destination][part[1]]]
            last = [sum(count[source][:1]), sum(count[destination][: hop + 1]) + hop]  # the padding node of a hop
            padded.append(torch.cat((torch.stack(ends), torch.tensor(last)[:, None].expand(2, 2)), 1))
        edges[name] = tuple(padded)
    features = {k: tuple(torch.cat((part, part.new_zeros(1, 5))) for part in parts) for k, parts in batch.features.items()}
    more = torch.tensor([-1])
    padded_batch = Batch(features, edges, torch.cat((batch.labels, more)), torch.cat((batch.papers, more)))
    own, expected = gradients(model, padded_batch), gradients(model, batch)
    for name in expected:
        assert_close(own[name], expected[name])
    assert_close(rgat.predictions(model, padded_batch), rgat.predictions(model, batch))
    assert_close(rgat.score(model, padded_batch), rgat.score(model, batch))


def test_a_relation_without_edges_adds_its_bias() -> None:
    model, batch = new_model(), make_batch()
    convs: Any = model.convs[1].convs
    torch.nn.init.normal_(convs[f"<{RELATIONS[1]}>"].bias)
    empty = batch._replace(edges={name: tuple(hop[:, :0] for hop in hops) for name, hops in batch.edges.items()})
    biases = sum(conv.bias for name, conv in convs.items() if name.endswith("paper>"))
    assert_close(model(empty), model.lin(biases).expand(6, -1))


def test_a_captured_step_equals_an_eager_one_with_dropout_and_unused_relations() -> None:
    def losses(**kwargs: Any) -> list[float]:
        model, mesh = new_model(CFG.model_copy(update={"dropout": 0.3})), dist.single_process(torch.device("cpu"))
        cfg = StepConfig(precision="fp64", lr=0.01, capture="whole" if kwargs else "none", capture_shapes=2)
        step = Step(model, rgat.loss, cfg, mesh, counts=rgat.counted, **kwargs)
        batches = [make_batch(k) for k in (0, 1, 2, 3)]
        batches[2] = batches[2]._replace(edges={n: tuple(h[:, :0] for h in hops) for n, hops in batches[2].edges.items()})
        return [step(batches[k])["loss"].item() for k in (0, 1, 2, 3, 0, 1)]

    assert losses(graph=CPUGraph) == losses()


def test_half_precision() -> None:
    model, batch = new_model(), make_batch()
    narrow = batch._replace(features={k: tuple(part.half() for part in parts) for k, parts in batch.features.items()})
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.float()(narrow)
    assert logits.dtype == torch.bfloat16
    assert_close(logits.double(), model.double()(batch), rtol=0, atol=0.05)


def test_weights_of_pyg(tmp_path: Path) -> None:
    model = new_model()
    state = model.state_dict()
    older = {name.replace("<", "").replace(">", "").replace("___", "__"): value for name, value in state.items()}
    for key in [key for key in older if ".convs." in key and key.endswith("lin.weight")]:
        older[key.replace("lin.", "lin_src.")] = older[key.replace("lin.", "lin_dst.")] = older.pop(key)
    for name, content in (("now", state), ("older", {"state_dict": older})):
        torch.save(content, tmp_path / name)
        loaded = RGAT.load(tmp_path / name)
        assert loaded.cfg == CFG.model_copy(update={"dropout": 0.2}) and loaded.state_dict().keys() == state.keys()
        assert_close(loaded.double()(make_batch()), model.eval()(make_batch()), rtol=1e-6, atol=1e-6)
    model.save(tmp_path / "own.safetensors")
    assert RGAT.load(tmp_path / "own.safetensors", CFG).cfg == CFG
    with pytest.raises(CheckpointError, match="the weights have hidden 6, the settings 8"):
        RGAT.load(tmp_path / "now", CFG.model_copy(update={"hidden": 8}))
    older["convs.0.convs.paper__cites__paper.lin_dst.weight"] = torch.zeros(6, 5)
    torch.save(older, tmp_path / "two")
    with pytest.raises(CheckpointError, match=r"lin_dst.weight differs from lin_src.weight; expected one projection"):
        RGAT.load(tmp_path / "two")


def test_wrong_batches_and_settings() -> None:
    model, batch = new_model(), make_batch()
    changes: Any = (
        ({"edges": {}}, "the batch lacks author___rev_written_by___paper, paper___cites___paper"),
        ({"features": {"paper": batch.features["paper"]}}, "the batch lacks author, journal"),
        ({"features": {kind: parts[:2] for kind, parts in batch.features.items()}}, r"the batch has \[1, 2\] hops"),
    )
    for change, message in changes:
        with pytest.raises(DataError, match=message):
            model(batch._replace(**change))
    wrong: Any = (
        ({"hidden": 6, "heads": 4}, "hidden is 6; expected a multiple of the 4 heads"),
        ({"relations": ("a__b___c",)}, "expected source___name___destination"),
        ({"relations": ("a___b___c",)}, "no relation ends in target 'paper'"),
        ({"relations": ("a___b___paper",) * 2}, "duplicate"), ({"classes": ("a", "a")}, "duplicate"),
        ({"classes": ("a", "b"), "num_classes": 3}, "classes has 2 names"),
    )
    for settings, message in wrong:
        with pytest.raises(ValidationError, match=message):
            RGATConfig(**settings)
