"""R-GAT agrees with stored results of PyTorch Geometric's GATConv and HeteroConv (tests/data/rgat)."""

import gzip
import json

import pytest
import torch

from hpcai.models import rgat
from hpcai.models.rgat import RGAT, Batch, RGATConfig
from tests.reference_data import DATA, load_json, load_tensors
from tests.subgraphs import full_batch, split_batch

STORED, GRAPH, RESULTS = load_tensors("rgat/outputs"), load_tensors("rgat/graph"), load_json("rgat/outputs")
RELATIONS = ["___".join(parts) for parts in RESULTS["relations"]]
TOLERANCES = {torch.float64: (1e-12, 1e-12, 1e-8), torch.float32: (1e-5, 1e-6, 1e-4)}  # of logits, loss, norms of gradients
SHORT = [name.replace("___", "__") for name in RELATIONS]


def load_model(dtype: torch.dtype) -> RGAT:
    return RGAT.load(DATA / "rgat/weights.npz").to(dtype)


def full(dtype: torch.dtype) -> Batch:
    x = {kind: GRAPH[f"x/{kind}"].to(dtype) for kind in RESULTS["nodes"]}
    labels = torch.full((len(x["paper"]),), -1)
    labels[STORED["seeds"]] = STORED["seed_labels"]
    return full_batch(x, {name: GRAPH[f"edges/{short}"] for name, short in zip(RELATIONS, SHORT)}, labels, 3)


def sampled(dtype: torch.dtype) -> Batch:
    case = RESULTS["sampled"]
    x = {kind: GRAPH[f"x/{kind}"][STORED[f"sampled/nodes/{kind}"]].to(dtype) for kind in RESULTS["nodes"]}
    edges = {name: STORED[f"sampled/edges/{short}"] for name, short in zip(RELATIONS, SHORT)}
    counts = [{name: hop[short] for name, short in zip(RELATIONS, SHORT)} for hop in case["edges_per_hop"]]
    return split_batch(x, case["nodes_after_hop"], edges, counts, STORED["seed_labels"])


@pytest.mark.parametrize("case", ["full", "sampled"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_logits_loss_and_gradients(case: str, dtype: torch.dtype) -> None:
    logits, loss, norm = TOLERANCES[dtype]
    model, batch, expected = load_model(dtype), {"full": full, "sampled": sampled}[case](dtype), RESULTS[f"{case}_f64"]
    torch.testing.assert_close(model(batch).double(), STORED[f"{case}_logits_f64"], rtol=0, atol=logits)
    value = rgat.loss(model, batch)["loss"]
    value.backward()
    assert value.item() == pytest.approx(expected["loss"], abs=loss)
    norms = {name: p.grad.double().norm().item() for name, p in model.named_parameters() if p.grad is not None}
    assert set(norms) == set(expected["grad_l2"])
    floor = 1e-4 * max(expected["grad_l2"].values())
    for name, value in expected["grad_l2"].items():
        assert abs(norms[name] - value) < norm * (value + floor), name


def test_outputs_of_each_layer() -> None:
    model, batch, outputs = load_model(torch.float64), full(torch.float64), []
    for conv in model.convs:
        conv.register_forward_hook(lambda _, __, result: outputs.append(result))
    model(batch)
    for layer, result in enumerate(outputs):
        for kind, value in result.items():
            torch.testing.assert_close(value, STORED[f"full_conv{layer}/{kind}_f64"], rtol=0, atol=1e-12)
    needed = [["author", "fos", "institute", "paper"], ["author", "fos", "paper"], ["paper"]]
    assert [sorted(result) for result in outputs] == needed


def test_names_and_sizes_are_those_of_the_reference() -> None:
    names = json.loads(gzip.decompress((DATA / "rgat/names_igbh.json.gz").read_bytes()))
    for case in (value for value in names.values() if isinstance(value, dict) and "tensors" in value):
        relations = tuple("___".join(parts) for parts in case["relations"])
        with torch.device("meta"):
            model = RGAT(RGATConfig(relations=relations, num_classes=case["classes"]))
        assert {name: [*p.shape] for name, p in model.named_parameters()} == dict(case["tensors"])
        assert sum(p.numel() for p in model.parameters()) == case["total"]
    assert RGATConfig().relation_names == tuple("___".join(parts) for parts in names["full_11_relations_2983"]["relations"])


def test_accuracy() -> None:
    case = RESULTS["accuracy"]
    logits, labels = torch.nn.functional.one_hot(torch.tensor(case["predictions"])).double(), torch.tensor(case["labels"])
    scores = []
    for first, last in zip(case["rank_bounds"], case["rank_bounds"][1:]):
        batch, own = Batch({}, {}, labels[first:last], labels[first:last]), logits[first:last]
        scores.append(rgat.score(lambda _, own=own: own, batch)["accuracy"])
    assert [(right / count).item() for right, count in scores] == pytest.approx(case["rank_accuracy"])
    assert sum(right for right, _ in scores) / sum(count for _, count in scores) == pytest.approx(case["over_all_samples"])
