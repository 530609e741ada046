"""The reference graph of R-GAT (tests/data/rgat) as a folder."""

import argparse
from functools import partial
from pathlib import Path

import numpy as np

from data_prep.igb import write_graph
from tests.reference_data import load_arrays, load_json

REFERENCE = load_json("rgat/outputs")
EDGES = {key[6:].replace("__", "___"): edges for key, edges in load_arrays("rgat/graph").items() if key.startswith("edges/")}


def write_reference_graph(folder: Path) -> Path:
    """Write the graph, with float32 features."""
    arrays = load_arrays("rgat/graph")
    relations = {name: partial(iter, [EDGES[name]]) for name in map("___".join, REFERENCE["relations"])}
    features = {name: partial(np.asarray, arrays[f"x/{name}"]) for name in REFERENCE["nodes"]}
    splits = {"train": np.arange(40), "validation": np.arange(40, 60)}
    options, labels = argparse.Namespace(out=folder, workers=1, command="test"), arrays["labels"]
    write_graph(options, REFERENCE["nodes"], relations, features, 12, "float32", labels, 6, splits)
    return folder
