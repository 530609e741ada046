"""Each app with the smallest settings and data that it accepts: six steps in two epochs."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from data_prep import text
from tests.apps import universes
from tests.apps.app_runs import App


def simulator(prep: str, args: str) -> Callable[[Path], None]:
    """Return a function that simulates data into a folder with the command line arguments ``args``."""

    def simulate(folder: Path) -> None:
        argv = ["simulate", str(folder), *args.split(), "--workers", "1", "--no-check"]
        assert import_module(f"data_prep.{prep}").main(argv) == 0

    return simulate


COSMOFLOW = App(
    "cosmoflow",
    lambda folder: universes.write_universes(folder, size=16),
    ["model.size=16", "model.blocks=4", "model.filters=2", "data.batch=8", "train.report_every=1", "train.epochs=2",
     "step.schedule.decay=none"],
)  # fmt: skip
BERT = App(  # 16 or more rows of three sequences in training, and 8 in validation, of two families
    "bert",
    simulator("bert", "--families 2 --sequences 40 --each 1 --length 16 20 --row 64 --validation 0.3"),
    ["model.width=16", "model.layers=1", "model.heads=4", "model.inner=24", "data.batch=4", "data.evaluation_batch=4",
     "train.report_every=1", "train.evaluate_every=1", "data.pictures=4", "data.epoch=12", "train.epochs=2",
     "step.schedule={decay: none, warmup: 0}"],
)  # fmt: skip
DEEPCAM = App(  # 12 training and 6 validation maps
    "deepcam",
    simulator("deepcam", "--samples 18 --height 64 --width 96 --spacing 0.75 --validation 0.34 --test 0 --rows 4"),
    ["model.middle=1", "model.divide=16", "model.frequencies=[0.95,0.01,0.04]", "data.batch=4", "data.evaluation_batch=4",
     "train.report_every=1", "train.epochs=2", "step.precision=fp32", "data.pictures=2",
     "step.schedule.decay=none"],
)  # fmt: skip
RESNET = App(  # 12 training and 6 validation galaxies of 32 x 32 pixels
    "resnet",
    simulator("galaxies", "--samples 18 --size 32 --validation 0.34 --test 0 --rows 6"),
    ["model.layers=[1,1,1,1]", "model.base_width=4", "model.size=32", "model.resize=32", "data.batch=4", "data.evaluation_batch=4",
     "train.report_every=1", "train.epochs=2", "train.evaluate_every=1", "train.evaluate_from=null", "step.precision=fp32",
     "data.pictures=4", "step.schedule.decay=none", "step.schedule.warmup=0"],
)  # fmt: skip
RETINANET = App(  # 12 training and 6 validation fields of 64 x 64 pixels
    "retinanet",
    simulator("survey", "--samples 18 --size 64 --galaxies 4 --stars 3 --validation 0.34 --test 0 --rows 6"),
    ["model.base_width=4", "model.fpn_channels=8", "model.size=[64,64]", "model.detections=150", "model.score_threshold=0.0",
     "data.batch=4", "data.evaluation_batch=4", "train.report_every=1", "train.epochs=2", "train.evaluate_every=1",
     "step.precision=fp32", "data.pictures=4", "step.schedule.decay=none", "step.schedule.warmup=0"],
)  # fmt: skip
RGAT = App(  # about 90 training and 40 validation papers of three communities; two papers in a sub-graph
    "rgat",
    simulator("igb", "--papers 160 --communities 3 --years 6 --features 8"),
    ["model.hidden=8", "model.heads=2", "model.dropout=0.0", "data.fan_out=[4,3]", "data.batch=8", "data.papers=2", "data.epoch=24",
     "data.evaluation_batch=8", "data.pictures=29", "train.report_every=1", "train.epochs=2", "train.evaluate_every=1",
     "step.schedule={decay: none, warmup: 0}"],
)  # fmt: skip
DLRM = App(  # 168 training and 72 validation reads, in blocks of 7
    "dlrm",
    simulator("events", "--events 240 --validation 0.3 --organisms 3 --genome 1000 --rows 12 --length 60 --positives 0.3"),
    ["model.dim=8", "model.bottom=[8]", "model.top=[8,1]", "model.cross_layers=1", "model.cross_rank=4", "data.batch=56",
     "data.rows=7", "data.evaluation_batch=56", "data.pictures=28", "train.report_every=1", "train.epochs=2",
     "train.evaluate_every=1"],
)  # fmt: skip
UNET3D = App(  # six training and three validation volumes of about 18 x 40 x 40 voxels
    "unet3d",
    simulator("kits19", "--cases 9 --validation 0.34 --spacing 14 9 9 --least 16 32 32"),
    ["model.filters=[4,6,8]", "model.window=[16,32,32]", "model.spacing_mm=[14,9,9]", "data.batch=2", "train.report_every=1",
     "train.epochs=2", "train.evaluate_every=1", "step.precision=fp32", "data.pictures=2",
     "step.schedule.decay=none"],
)  # fmt: skip
OPENCATALYST = App(  # 74 training and 37 validation frames of slabs with 13 or 14 atoms
    "opencatalyst",
    simulator("opencatalyst", "--systems 3 --each 1 --validation 0.34 --size 2 2 3 --dynamics 5"),
    ["model.hidden=12", "model.output=12", "model.interaction=6", "model.basis=4", "model.blocks=1", "model.cutoff=4.0",
     "data.batch=24", "data.evaluation_batch=36", "train.report_every=1", "train.epochs=2", "train.evaluate_every=1",
     "data.pictures=6", "step.schedule.decay=none", "step.schedule.warmup=0"],
)  # fmt: skip
OPENFOLD = App(  # six training and six validation chains, three per family: each has the two others as templates
    "openfold",
    simulator("openfold", "--chains 12 --families 4 --each 1 --length 18 22 --rows 9 --validation 0.5 --templates 2"),
    ["model.blocks=1", "model.structure.passes=2", "features.crop=16", "features.clusters=4", "features.extra=5", "data.batch=4",
     "data.epoch=12", "train.steps=6", "train.report_every=1", "data.pictures=2"],
)  # fmt: skip


def _convert_texts(folder: Path) -> None:
    """Write 24 training rows of 32 bytes from six documents, and 6 validation rows from two."""
    source = folder.with_name("source")
    for split, count in (("train", 6), ("validation", 2)):
        (source / split).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            lines = (f"{split} {number} is followed by {number + step}.\n" for step in range(9))
            (source / split / f"{number}.txt").write_text("".join(lines)[:128])
    argv = ["convert", str(source / "train"), str(folder), "--validation", str(source / "validation"), "--tokenizer", "bytes"]
    assert text.main([*argv, "--sequence", "32", "--each", "8", "--workers", "1"]) == 0


LLM = App(
    "llm", _convert_texts,
    ["model.vocabulary=260", "model.width=16", "model.layers=2", "model.heads=2", "model.inner=24", "model.positions=32",
     "data.batch=8", "train.report_every=1", "train.epochs=2", "train.steps=null", "data.pictures=2", "step.schedule.decay=none",
     "step.schedule.warmup=0"],
)  # fmt: skip
DIFFUSION = App(  # 24 training maps of 16 x 16 pixels, and 12 of other universes
    "diffusion",
    simulator("fields", "--kind matter --samples 36 --size 16 --slabs 1 --thickness 4 --validation 0.34 --test 0 --rows 6"
             " --particles-per-cell 1"),
    ["model.unet.channels=[8,16]", "model.unet.heads=[1,2]", "model.unet.groups=4", "model.sampler.steps=2", "data.batch=8",
     "data.evaluation_batch=4", "data.drawn=3", "data.members=4", "train.report_every=1", "train.epochs=2", "train.steps=null",
     "step.schedule.decay=none", "step.schedule.warmup=0"],
)  # fmt: skip
