"""OUT/samples.png: plots of some samples of any data set, by the datasets of its index."""

import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from data_prep import store
from hpcai.data.image_files import decode_image, open_image, to_rgb
from hpcai.durable import replace_file

NAME = "samples.png"
SAMPLES, PANELS = 4, 5                          # columns; rows at most, of the largest datasets
CLASSES, FILES = 20, 64                         # of images: rows at most; files in which they are looked for
MIN_VALUES = 8                                  # of a dataset that is drawn


def draw(locations: Sequence[tuple[Path, int]], index: dict[str, Any], path: Path) -> None:
    """Draw a column for each of a few samples, given as (path, row), and a panel for each of its largest datasets."""
    from matplotlib.figure import Figure

    fields = {name: store.Field(entry["dtype"], tuple(entry["shape"])) for name, entry in index["fields"].items()}
    samples, locations = [], locations[:: max(1, -(-len(locations) // SAMPLES))]
    for file_path, row in locations:
        with h5py.File(file_path, "r") as file:
            present = {name: field for name, field in fields.items() if name in file}
            samples.append(next(store.read_rows(file, present, row, row + 1)))
    sizes = {name: np.size(value) for name, value in samples[0].items() if np.asarray(value).dtype.kind in "iuf"}
    shown = sorted((name for name, size in sizes.items() if size >= MIN_VALUES), key=lambda name: -sizes[name])[:PANELS]
    figure = Figure(figsize=(4 * len(samples), 3 * len(shown)), layout="constrained")
    axes = figure.subplots(len(shown), len(samples), squeeze=False)
    for column, sample, (file_path, row) in zip(axes.T, samples, locations):
        column[0].set_title(f"{file_path.parent.name}/{file_path.name} row {row}", fontsize=9)
        for axis, name in zip(column, shown):
            _panel(axis, np.squeeze(sample[name]))
            unit = index["fields"][name].get("unit")
            axis.set_ylabel(f"{name}, {unit}" if unit else name, fontsize=9)
    figure.savefig(content := io.BytesIO(), dpi=80, format="png")
    replace_file(path, content.getvalue())


def draw_classes(locations: Sequence[tuple[Path, int]], index: dict[str, Any], path: Path, columns: int = 10) -> None:
    """Draw a row of images for each of the first classes. They are files in a ragged dataset "image", with "label"."""
    from matplotlib.figure import Figure

    names, files = index["classes"][:CLASSES], [*dict.fromkeys(file_path for file_path, _ in locations)]
    examples: list[list[Any]] = [[] for _ in names]
    for file_path in files[:: max(1, -(-len(files) // FILES))]:
        with h5py.File(file_path, "r") as file:
            offsets, labels = np.append(0, np.cumsum(file["bytes"][...], dtype=np.int64)), file["label"][...]
            for row in np.flatnonzero(labels < len(names)):
                if len(chosen := examples[labels[row]]) < columns:
                    data = file["image"][offsets[row] : offsets[row + 1]].tobytes()
                    with open_image(data, f"{file_path}: row {row}") as image:
                        chosen.append(to_rgb(image)[0])
                    chosen[-1].thumbnail((120, 120))
    figure = Figure(figsize=(1.5 * columns, 1.5 * len(names) + 0.4), layout="constrained")
    figure.suptitle(f"{path.parent.name}: {len(index['classes'])} classes, {len(locations):,} images", fontsize=11)
    for axes, chosen, name in zip(figure.subplots(len(names), columns, squeeze=False), examples, names):
        axes[0].set_ylabel(name, fontsize=9)
        for axis, image in itertools.zip_longest(axes, chosen):
            axis.set(xticks=[], yticks=[])
            axis.set_frame_on(False)
            if image is not None:
                axis.imshow(image, interpolation="nearest")
    figure.savefig(content := io.BytesIO(), dpi=80, format="png")
    replace_file(path, content.getvalue())


def draw_boxes(locations: Sequence[tuple[Path, int]], index: dict[str, Any], path: Path, count: int = 9) -> None:
    """Draw some images with the boxes of their objects, in colours of the classes. They are as of data_prep.coco."""
    from matplotlib.figure import Figure

    fields = {name: store.Field(entry["dtype"], tuple(entry["shape"])) for name, entry in index["fields"].items()}
    figure = Figure(figsize=(15, 15.5), layout="constrained")
    figure.suptitle(", ".join(f"{name} (C{k % 10})" for k, name in enumerate(index["classes"][:CLASSES])), fontsize=11)
    for axis, (file_path, row) in zip(figure.subplots(3, 3).flat, locations[:: max(1, len(locations) // count)]):
        with h5py.File(file_path, "r") as file:
            values = next(store.read_rows(file, fields, row, row + 1))
        axis.imshow(decode_image(values["image"].tobytes(), f"{file_path}: row {row}"))
        axis.set_title(f"{file_path.parent.name}/{file_path.name} row {row}", fontsize=9)
        axis.set_axis_off()
        for (left, top, right, bottom), label in zip(values["boxes"], values["labels"]):
            axis.plot([left, right, right, left, left], [top, top, bottom, bottom, top], f"C{label % 10}", linewidth=1)
    figure.savefig(content := io.BytesIO(), dpi=80, format="png")
    replace_file(path, content.getvalue())


def _panel(axis: Any, values: np.ndarray) -> None:
    """Draw an image of the two longest dims, in the middle of the others, or curves if there are few columns."""
    while values.ndim > 2:
        short = int(np.argmin(values.shape))
        values = values.take(values.shape[short] // 2, short)
    if values.ndim < 2 or min(values.shape) < 4:
        axis.plot(values, linewidth=0.6)
        return
    low, high = np.quantile(values, (0.002, 0.998))
    axis.imshow(values.astype(np.float32), origin="lower", vmin=low, vmax=high, interpolation="nearest", aspect="auto")
    axis.set(xticks=[], yticks=[])
