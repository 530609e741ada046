"""README and pages: their notebook cells run, their settings exist, and no command installs another project's package."""

import json
import re
import sys
import types
from pathlib import Path
from typing import get_args

import h5py
import numpy as np
import pytest
import torch

from hpcai.models.bert import Bert, BertConfig
from hpcai.models.cosmoflow import CosmoFlow, CosmoFlowConfig
from hpcai.models.deepcam import VARIABLES, DeepCam, DeepCamConfig
from hpcai.models.diffusion import Diffusion, DiffusionConfig, UNetConfig
from hpcai.models.dlrm import DLRM, DLRMConfig
from hpcai.models.openfold import OpenFold, OpenFoldConfig
from hpcai.models.openfold.structures import write_structure
from hpcai.models.resnet import ResNet, ResNetConfig
from hpcai.models.retinanet import RetinaNet, RetinaNetConfig
from hpcai.models.rgat import RGAT, RGATConfig
from hpcai.models.unet3d import UNet3D, UNet3DConfig
from hpcai.settings import LoaderConfig
from tests import proteins
from tests.graphs import EDGES, write_reference_graph
from tests.tracked import tracked_files

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
TINY = OpenFoldConfig.preset("model_1", blocks=1, extra={"blocks": 1}, msa=16, pair=8, single=16)


PLAIN = {"docs/containers.md", "docs/reading.md"}  # output of a program, a tree of calls: blocks without a language
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
ELSEWHERE = {  # pages with Python that other tests run
    "apps/align/README.md": "tests/apps/test_align.py",
    "apps/llm/README.md": "tests/apps/test_llm.py",
    "apps/opencatalyst/README.md": "tests/unit/models/test_dimenet_formats.py",
    "docs/new_model.md": "tests/apps/test_new_model.py",
    "docs/parallel.md": "tests/ranks/test_parallel_page.py",
}


def write_events(folder: Path) -> None:
    folder.mkdir(parents=True)
    split = {"rows": 70, "positives": 0}
    content = {"dense": 2, "tables": [{"name": "a", "rows": 5, "hotness": 2}], "splits": {"validation": split}}
    (folder / "table.json").write_text(json.dumps(content))
    np.zeros((70, 5), np.int32).tofile(folder / "validation.bin")


def run_cells(page: str, count: int, names: dict) -> dict:  # type: ignore[type-arg]
    """Run the Python cells of a page with ``names`` as globals, and return these."""
    cells = [text for language, text in BLOCK.findall((ROOT / page).read_text()) if language in ("python", "py")]
    assert len(cells) == count
    for cell in cells:
        exec(cell, names)
    return names


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the saved weights of runs."""
    monkeypatch.chdir(tmp_path)
    models = {
        "cosmoflow": CosmoFlow(CosmoFlowConfig(size=32, filters=2, dropout=0.0, low=(0.1,) * 4, high=(0.9,) * 4)),
        "deepcam": DeepCam(DeepCamConfig(divide=16, middle=0, low=(0.0,) * 16, high=(1.0,) * 16)),
        "resnet": ResNet(ResNetConfig(layers=(1, 1, 1, 1), base_width=4, size=32, resize=36, classes=("disc", "merger"))),
        "bert": Bert(BertConfig(vocabulary=32, width=16, layers=1, heads=2, inner=16, positions=8, types=1, nsp=False)),
        "dlrm": DLRM(DLRMConfig(dense_features=2, rows=(5,), hotness=(2,), dim=4, bottom=(4,), cross_rank=2, top=(1,))),
        "retinanet": RetinaNet(RetinaNetConfig(base_width=4, groups=1, width_per_group=64, size=(64, 64), num_classes=2)),
        "rgat": RGAT(RGATConfig(features=12, hidden=8, heads=2, layers=2, relations=tuple(EDGES), num_classes=6)),
        "unet3d": UNet3D(UNet3DConfig(filters=(4, 4), window=(8, 16, 16))),
    }
    for name, model in models.items():
        folder = tmp_path / f"runs/{name}-small"
        folder.mkdir(parents=True)
        model.save(folder / "model.safetensors")
    return tmp_path / "runs"


@pytest.mark.parametrize(("page", "cells"), [("README.md", 1), ("docs/first_hour.md", 2)])
def test_the_first_cells_run(page: str, cells: int, runs: Path) -> None:
    folder = runs.parent / "datasets/cosmoflow-small/validation"
    folder.mkdir(parents=True)
    with h5py.File(folder / "a.h5", "w") as file:
        file["counts"] = np.random.default_rng(0).poisson(2, (2, 32, 32, 32, 4)).astype(np.int16)
        file["target"] = np.zeros((2, 4), np.float32)
    names = run_cells(page, cells, {})
    assert set(names["model"].predict(names["universes"].read(0)["counts"])) == {"Omega_m", "sigma_8", "n_s", "H_0"}


def test_the_cells_of_pages_run(runs: Path) -> None:
    fields = {name: np.full((40, 50), 0.5 / (100 if name == "PSL" else 1)) for name in VARIABLES}
    assert run_cells("apps/deepcam/README.md", 1, {"fields": fields})["masks"]["tropical cyclone"].shape == (40, 50)
    protein = {"tokens": torch.tensor([[2, 5, 6, 3, 2, 7, 3, 0]]), "lengths": torch.tensor([[4, 3]])}
    names = run_cells("apps/bert/README.md", 1, protein)
    assert names["logits"].shape == (1, 8, 32) and names["stable"](protein["tokens"], protein["lengths"]).shape == (1, 2, 2)
    images = [np.zeros((50, 40, 3), np.uint8)]
    assert run_cells("apps/resnet/README.md", 1, {"images": images})["probabilities"][0].keys() == {"disc", "merger"}
    assert run_cells("apps/retinanet/README.md", 1, {"images": images})["objects"][0].keys() == {"boxes", "scores", "classes"}
    write_reference_graph(runs.parent / "datasets/rgat-small")
    assert run_cells("apps/rgat/README.md", 1, {})["logits"].shape == (20, 6)
    write_events(runs.parent / "datasets/dlrm-small")
    assert run_cells("apps/dlrm/README.md", 1, {})["probability"].shape == (64,)
    scan = np.random.default_rng(0).normal(0, 100, (8, 30, 30))
    assert run_cells("apps/unet3d/README.md", 1, {"scan": scan})["organs"]["kidney"].shape == scan.shape
    names = run_cells("docs/glossary.md", 1, {"nn": torch.nn, "GatherFull": torch.nn.Flatten, "partition": 0, "size": -1})
    assert names["block"](torch.zeros(1, 8, 3, 3, 3)).shape == (8,), "the seam has been replaced"


def test_each_page_with_python_has_a_test() -> None:
    tracked = [page for page in tracked_files("*.md") if not page.startswith("tests/")]
    blocks = {(page, language) for page in tracked for language, _ in BLOCK.findall((ROOT / page).read_text())}
    here = re.findall(r'\("([\w/]+\.md)", \d', Path(__file__).read_text())
    assert {page for page, language in blocks if language in ("python", "py")} == {*here, *ELSEWHERE}
    assert {page for page, language in blocks if language not in ("sh", "py", "python", "yaml")} == PLAIN
    assert all(page in (ROOT / test).read_text() for page, test in ELSEWHERE.items())


def test_the_cells_of_the_diffusion_page_run(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = {"inputs": 1, "outputs": 1, "field": 1, "tokens": None, "channels": (8,), "blocks": 1, "attention": ("none",)}
    fields = {"names": ("density",), "units": ("mean",), "mean": (-0.3,), "deviation": (1.2,), "floor": 0.05, "factor": 4}
    cfg = DiffusionConfig.model_validate({
        "unet": {**network, "middle": "none", "heads": (1,), "groups": 4}, "size": (1, 64, 64), "fields": fields,
        "objective": {"prediction_type": "flow"}, "sampler": {"method": "euler", "steps": 2},
    })  # fmt: skip
    (runs / "diffusion-small").mkdir()
    Diffusion(cfg).save(runs / "diffusion-small/model.safetensors")
    stand_in = types.SimpleNamespace(InceptionV3=lambda: lambda images: [images.mean((2, 3))])  # its weights are downloaded
    monkeypatch.setitem(sys.modules, "pytorch_fid.inception", stand_in)  # type: ignore[arg-type]
    (runs / "diffusion-turbulence").mkdir()
    forecasts = cfg.fields.model_copy(update={"transforms": ("none",), "factor": 0, "interval": (1.0, "hours")})  # type: ignore[union-attr]
    states = {"unet": UNetConfig(**{**network, "field": 0, "fine": 1}, middle="none", heads=(1,), groups=4), "fields": forecasts}
    Diffusion(cfg.model_copy(update=states)).save(runs / "diffusion-turbulence/model.safetensors")
    given = {"coarse": torch.rand(2, 1, 16, 16) + 0.5, "vorticity": torch.randn(2, 1, 64, 64)}
    names = run_cells("apps/diffusion/README.md", 3, given)
    assert names["density"].shape == (16, 2, 1, 64, 64) and names["states"].shape == (16, 8, 2, 1, 64, 64)
    assert names["Pool"]()(torch.rand(2, 3, 9, 9)).shape == (2, 3)


def test_the_cell_of_the_openfold_page_runs(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("gemmi")
    chain = proteins.random_chain(12)
    monkeypatch.chdir(tmp_path)
    OpenFold(TINY).save(tmp_path / "params_model_1.npz", form="alphafold")
    for folder in ("alignments/5zyh_A", "pdb_mmcif"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "alignments/5zyh_A/hits.a3m").write_text(f">5zyh_A\n{chain.sequence}\n")
    (tmp_path / "hits.hhr").write_text("Query         5zyh_A\n\n No Hit\n")
    write_structure(tmp_path / "5zyh.cif", chain.aatype, chain.positions, chain.mask, chain.bfactors, chain="A")
    letters = np.array([["ACDEFGHIKLMNPQRSTVWY".index(letter) for letter in chain.sequence]])
    raw = {"aatype": np.eye(21)[chain.aatype], "msa": letters, "deletion_matrix_int": np.zeros((1, 12), int)}
    names = run_cells("apps/openfold/README.md", 1, {"sequence": chain.sequence, "raw": raw})
    assert (tmp_path / "5zyh_A.cif").exists() and names["features"]["template_mask"].sum() == 0 and names["refused"] == {}
    assert names["features"]["aatype"].shape == (256, 4) and names["fold"].positions.shape == (12, 37, 3)


def test_the_cell_of_the_data_page_runs(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "train").mkdir()
    with h5py.File(tmp_path / "train" / "a.h5", "w") as file:
        file["image"], file["label"] = np.ones((8, 3, 512, 512), np.float32), np.zeros((8, 512, 512), np.uint8)
    monkeypatch.chdir(tmp_path)
    names = run_cells("docs/data.md", 1, {})
    assert names["batch"]["image"].shape == (8, 3, 512, 512) and names["batch"]["label"].dtype == torch.uint8


def test_settings_on_the_data_page_exist() -> None:
    from apps.llm.settings import DataConfig

    page = (ROOT / "docs/data.md").read_text()
    fields = LoaderConfig.model_fields
    for name in re.findall(r"data\.(\w+)=", page + README):
        assert name in DataConfig.model_fields, name
    readers = set(re.findall(r"^\| `(\w+)` \|", page, re.M))
    assert readers == set(get_args(fields["reader"].annotation))


def test_the_commands_that_prove_claims_have_tests() -> None:
    commands = re.findall(r"\| `(tests[^`]*)` \|$", (ROOT / "docs/claims.md").read_text(), re.M)
    assert len(commands) >= 12
    for command in commands:
        paths, _, keywords = command.partition(" -k ")
        targets = [ROOT / path for path in paths.split()]
        files = [file for target in targets for file in ([target] if target.suffix else target.rglob("test_*.py"))]
        names = "\n".join(name for file in files for name in re.findall(r"^ *def (test_\w+)", file.read_text(), re.M))
        assert names and all(keyword in names for keyword in keywords.strip('"').split(" or ")), command


def test_no_document_installs_the_package_of_another_project() -> None:
    bare = re.compile(r"pip3? install +(-\S+ +)*" + "hpcai" + r"($|[^-/.\w])", re.M)
    for name in tracked_files():
        path = ROOT / name
        if path.suffix in {".md", ".py", ".sh", ".yaml", ".toml", ""} and path != Path(__file__):
            assert not bare.search(path.read_text(errors="replace")), name


def test_settings_that_the_documents_name_exist() -> None:
    from apps.cosmoflow.settings import Config
    from apps.llm.settings import Config as Texts
    from apps.opencatalyst.settings import Config as Atoms
    from apps.openfold.settings import Config as Proteins
    from hpcai import config

    required = {"step.compile_cache=x": "step.compile=whole", "step.shard_within=8": "step.shard=optimizer"}
    required |= {"data.shards=2": "data.stage=x"}
    pairs = set()
    for text in (README, *((ROOT / "docs" / name).read_text() for name in ("performance.md", "data.md", "benchmarks.md"))):
        pairs |= set(re.findall(r"`((?:step|train|data|mesh)\.[a-z_]+(?:\.[a-z_]+)*)(?:=([\w.\[\],-]+))?`", text))
    assert len(pairs) > 25
    for key, value in sorted(pairs):
        override = f"{key}={value.replace('FOLDER', 'x').replace('N', '2')}"
        texts = dict.fromkeys(("mesh.context", "mesh.tensor", "mesh.pipeline", "data.blend"), Texts)
        settings = {"data.balance": Atoms, "mesh.axial": Proteins, **texts}.get(key, Config)
        if value:
            config.load(settings, None, [override, *([required[override]] if override in required else [])])
            continue
        section: object = settings()
        for part in key.split("."):
            assert hasattr(section, part), f"{key}: there is no such setting"
            section = getattr(section, part)
