"""Fields of files that people have: a reanalysis, turbulence, microscopy; and files that do not fit together."""

import json
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from safetensors.numpy import load_file

from data_prep import fields
from data_prep.field_pairs import block_mean
from data_prep.standardize import Standard
from tests.data_prep.prep_contract import columns, read_json

xarray = pytest.importorskip("xarray", reason="xarray, of the extra fields, is not installed")
TIMES, HEIGHT, WIDTH = 40, 17, 32


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    """Return smooth fields, periodic along both sides, of mean 0 and deviation 1.   [..., H, W]"""
    white = np.random.default_rng(seed).standard_normal(shape)
    k = np.hypot(*np.meshgrid(np.fft.fftfreq(shape[-2]), np.fft.fftfreq(shape[-1]), indexing="ij"))
    smooth = np.fft.ifft2(np.fft.fft2(white) / (k + 0.05) ** 2).real
    return (smooth - smooth.mean()) / smooth.std()


def reanalysis() -> Any:
    """Return maps of the globe, from north to south, six hours apart."""
    variables = {
        "t2m": ("K", 288 + 10 * draw(TIMES, HEIGHT, WIDTH)), "tp": ("m", 1e-3 * np.exp(1.5 * draw(TIMES, HEIGHT, WIDTH, seed=1))),
        "z": ("m2 s-2", 5e4 + 900 * draw(TIMES, 2, HEIGHT, WIDTH, seed=2)),
    }  # fmt: skip
    sides = ("latitude", "longitude")
    data = {name: (("time", *(("level",) if name == "z" else ()), *sides), values.astype("f4"), {"units": unit})
            for name, (unit, values) in variables.items()}  # fmt: skip
    coordinates: dict[str, Any] = {
        "time": np.datetime64("2020-01-01", "ns") + 6 * np.arange(TIMES) * np.timedelta64(1, "h"), "level": [500, 850],
        "latitude": ("latitude", np.linspace(90, -90, HEIGHT), {"units": "degrees_north"}),
        "longitude": ("longitude", np.arange(WIDTH) * 360 / WIDTH, {"units": "degrees_east"}),
    }  # fmt: skip
    return xarray.Dataset(data, coordinates)


def coarse_of(dataset: Any) -> Any:
    """Return the means of blocks of 4 cells, without the last latitude in the order of the converted ones."""
    return dataset.isel(latitude=slice(1, None)).coarsen(latitude=4, longitude=4).mean(keep_attrs=True)


def convert(source: Path, out: Path, *options: str) -> dict[str, Any]:
    """Convert without workers, and return the index of the training split."""
    assert fields.main(["convert", str(source), str(out), "--workers", "1", *options]) == 0
    assert fields.main(["check", str(out), "--no-picture"]) == 0
    return read_json(out / "train/index.json")


def test_a_reanalysis_becomes_samples_in_the_order_of_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = reanalysis()
    (tmp_path / "files").mkdir()
    dataset.isel(time=slice(0, 25)).to_netcdf(tmp_path / "files/b.nc", engine="h5netcdf")
    dataset.isel(time=slice(25, None)).to_netcdf(tmp_path / "files/a.nc", engine="h5netcdf")
    index = convert(tmp_path / "files", tmp_path / "out", "--gap", "2", "--levels", "850")
    text = capsys.readouterr().out
    assert "36 for train, 2 for validation: samples of 3 x 16 x 32 cells, cut from 17 x 32" in text, text
    assert re.search(r"tp: .* skewness \d\.?\d*, log\(x \+ ", text) and "apps/diffusion/configs/fields.yaml" in text
    assert index["channels"] == ["t2m", "tp", "z_850"] and index["channel_units"] == ["K", "m", "m2 s-2"]
    assert index["transforms"] == ["none", "log", "none"] and index["periodic"] == [False, True]
    assert index["box"] == pytest.approx([180, 360]) and index["box_units"] == "degrees"
    standard = Standard.from_header(index)
    for split, first in (("train", 0), ("validation", 38)):
        rows = columns(tmp_path / "out" / split)
        for number, (high, low) in enumerate(zip(rows["high"], rows["low"])):
            at = dataset.isel(time=first + number, latitude=slice(None, 0, -1)).sel(level=850)
            true = np.stack([at.t2m.values, at.tp.values, at.z.values]).astype(float)
            assert standard.invert(high) == pytest.approx(true, rel=1e-5)
            assert low == pytest.approx(standard.apply(block_mean(true, 4, 2)), abs=1e-4)
    stored = np.stack(list(columns(tmp_path / "out/train")["high"]))
    assert abs(stored.mean((0, 2, 3))).max() < 0.05 and abs(stored.std((0, 2, 3)) - 1).max() < 0.05


def test_a_zarr_store_and_grids_of_other_sciences_are_read(tmp_path: Path) -> None:
    pytest.importorskip("zarr", reason="zarr, of the extra fields, is not installed")
    reanalysis().to_zarr(tmp_path / "era5.zarr", consolidated=False)
    assert len(convert(tmp_path / "era5.zarr", tmp_path / "zarr", "--variables", "tp", "--transform", "tp=sqrt")["mean"]) == 1
    turbulence = draw(20, 3, 16, 16).astype("f4")
    np.save(tmp_path / "velocity.npy", turbulence)
    options = "--variables u v w --periodic y x --factor 2"
    index = convert(tmp_path / "velocity.npy", tmp_path / "npy", *options.split())
    assert index["periodic"] == [True, True] and index["box"] == [16, 16] and index["box_units"] == "cells"
    assert Standard.from_header(index).invert(columns(tmp_path / "npy/train")["high"][3]) == pytest.approx(turbulence[3], abs=1e-4)
    with h5py.File(tmp_path / "cells.h5", "w") as file:  # volumes of a microscope, without coordinates
        file["stack"] = (2000 + 300 * draw(20, 8, 16, 16)).astype("u2")
    names = "phony_dim_1", "phony_dim_2", "phony_dim_3"
    index = convert(tmp_path / "cells.h5", tmp_path / "volumes", "--dims", *names, "--factor", "2", "--multiple", "4")
    assert index["shape"] == [1, 8, 16, 16] and index["periodic"] == [False] * 3


def test_a_coarse_source_is_taken_if_it_is_of_the_same_places_times_and_units(tmp_path: Path, capsys: Any) -> None:
    fine, options = tmp_path / "fine.nc", ["--coarse", str(tmp_path / "coarse.nc")]
    dataset = reanalysis()[["t2m"]].isel(latitude=slice(1, None))
    dataset.to_netcdf(fine, engine="h5netcdf")
    coarse = dataset.coarsen(latitude=4, longitude=4).mean(keep_attrs=True)
    biased = coarse.copy(deep=True)
    biased.t2m.values += 1.5 + 0.3 * draw(TIMES, 4, 8, seed=5)

    def written(changed: Any) -> int:
        changed.to_netcdf(tmp_path / "coarse.nc", engine="h5netcdf")
        return fields.main(["convert", str(fine), str(tmp_path / "out"), "--workers", "1", *options])

    celsius, reversed_north = biased.copy(deep=True), biased.copy(deep=True)
    celsius.t2m.attrs["units"] = "degC"
    unlabelled = biased.copy(deep=True)
    unlabelled.t2m.values -= 273.15
    reversed_north.t2m.values = reversed_north.t2m.values[:, ::-1]
    east = biased.copy(deep=True)
    east.t2m.values = np.roll(east.t2m.values, 3, 2)
    for changed, message in (
        (celsius, "has units ['degC']"), (unlabelled, "is it in another unit?"),
        (biased.isel(time=slice(1, None)), "has samples [39]"),
        (biased.assign_coords(time=biased.time + np.timedelta64(6, "h")), "sample 0 is of 2020-01-01T06"),
        (biased.assign_coords(longitude=biased.longitude + 20), "cells off the centres"),
        (reversed_north, "with latitude reversed by "), (east, "moved by 0 and -3 cells by "),
        (biased.isel(longitude=slice(0, 4)), "one ratio for all sides"),
    ):  # fmt: skip
        assert written(changed) == 2
        assert message in (error := capsys.readouterr().err), (message, error)
    assert written(biased) == 0 and re.search(r"coarse fields correlate by (0\.9\d|1\.00) with", capsys.readouterr().out)
    index, rows = read_json(tmp_path / "out/train/index.json"), columns(tmp_path / "out/train")
    truth = biased.t2m.values[7, ::-1]
    assert Standard.from_header(index).invert(rows["low"][7])[0] == pytest.approx(truth, rel=1e-5)


def test_static_fields_and_weights_are_beside_the_samples_and_masked_cells_are_left_out(tmp_path: Path, capsys: Any) -> None:
    dataset, land = reanalysis()[["t2m"]], draw(HEIGHT, WIDTH, seed=3) > 0.4
    dataset["swh"] = np.exp(draw(TIMES, HEIGHT, WIDTH, seed=5) + 0 * dataset.t2m).where(~land)       # of waves
    dataset["lsm"] = ("latitude", "longitude"), land
    dataset.to_netcdf(tmp_path / "x.nc", engine="h5netcdf")
    coordinates = {"lat": np.linspace(-90, 90, HEIGHT), "lon": dataset.longitude.values}
    height = xarray.Dataset({"orog": (("valid_time", "lat", "lon"), 500 * draw(1, HEIGHT, WIDTH, seed=4))}, coordinates)
    height.to_netcdf(tmp_path / "orography.nc", engine="h5netcdf")
    index = convert(tmp_path / "x.nc", tmp_path / "out", "--mask", "--static", "lsm", str(tmp_path / "orography.nc"))
    assert "swh: " in (text := capsys.readouterr().out) and f"masked in {land[:0:-1].mean():.1%} of its cells" in text, text
    assert index["channels"] == ["t2m", "swh"] and index["static"] == ["lsm", "orog"] and index["weighted"]
    arrays, sea = load_file(tmp_path / "out/static.safetensors"), ~land[:0:-1]
    assert (arrays["static"][0] == land[:0:-1]).all() and arrays["static"][1].std() == pytest.approx(1, rel=1e-5)
    assert np.corrcoef(arrays["static"][1].ravel(), height.orog.values[0, :-1].ravel())[0, 1] == pytest.approx(1)
    area = np.cos(np.radians(np.linspace(-90, 90, HEIGHT)[:-1]))[:, None] * np.ones(WIDTH)
    area[0] = (1 - np.cos(np.pi / 32)) / (2 * np.sin(np.pi / 32))              # the polar cap, in that unit
    for weights, values in zip(arrays["weights"], (area, area * sea)):
        assert weights == pytest.approx(values / values.mean(), rel=1e-5)
    rows, standard = columns(tmp_path / "out/train"), Standard.from_header(index)
    assert (rows["high"][:, 1, ~sea] == 0).all() and standard.transforms == ("none", "log")
    sample = dataset.swh.values[:36, :0:-1][:, sea]
    assert standard.floors[1] == pytest.approx(0.01 * sample.mean(), rel=0.05)
    assert standard.mean[1] == pytest.approx(np.log(sample + standard.floors[1]).mean(), abs=1e-3)
    cells = np.where(sea, standard.invert(rows["high"][5])[1], np.nan).reshape(4, 4, 8, 4).swapaxes(1, 2).reshape(4, 8, 16)
    low, empty = standard.invert(rows["low"][5])[1], np.isnan(cells).all(2)
    assert empty.any() and (rows["low"][:, 1, empty] == 0).all()
    assert low[~empty] == pytest.approx(np.nanmean(cells[~empty], 1), rel=1e-5)
    dataset.swh.values[9, 8, np.flatnonzero(~land[8])[:5]] = np.nan             # ice, once
    dataset.to_netcdf(tmp_path / "ice.nc", engine="h5netcdf")
    assert fields.main(["convert", str(tmp_path / "ice.nc"), str(tmp_path / "ice"), "--workers", "1", "--mask"]) == 2
    assert "2020-01-03T06:00: swh has a value only in some samples in 1.0% of its cells" in capsys.readouterr().err


def test_inputs_and_coarse_fields_of_other_variables_have_statistics_of_their_own(tmp_path: Path, capsys: Any) -> None:
    dataset, sea = reanalysis(), draw(HEIGHT, WIDTH, seed=3) < 0.4
    dataset[["tp"]].assign(sst=dataset.t2m.where(sea)).to_netcdf(tmp_path / "x.nc", engine="h5netcdf")
    (low := coarse_of(dataset)[["tp", "z"]]).to_netcdf(tmp_path / "low.nc", engine="h5netcdf")
    options = ["--inputs", "sst", "--mask", "--coarse", str(tmp_path / "low.nc"), "--coarse-variables", "z", "tp"]
    index = convert(tmp_path / "x.nc", tmp_path / "out", *options)
    assert [*index["channels"], *index["fine"]["channels"], *index["coarse"]["channels"]] == ["tp", "sst", "z_500", "z_850", "tp"]
    assert "tp: coarse fields correlate by 1.00 with" in capsys.readouterr().out
    rows, sea = columns(tmp_path / "out/train"), sea[:0:-1]
    fine, coarse = (Standard.from_header({**index, **index[name]}) for name in ("fine", "coarse"))
    assert (rows["fine"][..., ~sea] == 0).all() and abs(rows["fine"][..., sea].std() - 1) < 0.05
    assert fine.invert(rows["fine"][7])[0, sea] == pytest.approx(dataset.t2m.values[7, :0:-1][sea], rel=1e-5)
    assert coarse.invert(rows["low"][7]) == pytest.approx(np.concatenate((low.z[7], low.tp[7:8]))[:, ::-1], rel=1e-4)
    (tmp_path / "out/train/index.json").write_text(json.dumps(index | {"fine": index["coarse"]}))
    assert fields.main(["check", str(tmp_path / "out"), "--no-picture"]) == 2


def test_frames_of_trajectories_are_in_the_order_of_time_with_steps(tmp_path: Path, capsys: Any) -> None:
    members = [reanalysis()[["t2m"]].isel(latitude=slice(1, None)) + 20 * member for member in range(2)]
    dataset = xarray.concat(members, "number").transpose("number", "time", ...).drop_isel(time=10)
    (tmp_path / "files").mkdir()
    dataset.isel(time=slice(0, 25)).to_netcdf(tmp_path / "files/b.nc", engine="h5netcdf")
    dataset.isel(time=slice(25, None)).to_netcdf(tmp_path / "files/a.nc", engine="h5netcdf")
    index = convert(tmp_path / "files", tmp_path / "out", "--forecast", "--gap", "2", "--transform", "t2m=none")
    assert index["interval"] == [6, "hours"] and index["factor"] == 0 and sorted(index["fields"]) == ["high", "step"]
    assert "train: 70 frames, 6 hours apart, in 4 trajectories of at most 25" in capsys.readouterr().out
    rows = columns(tmp_path / "out/train")
    true = dataset.t2m.values[:, :35, ::-1].reshape(70, 1, 16, WIDTH)           # the first member, then the second
    assert Standard.from_header(index).invert(rows["high"]) == pytest.approx(true, rel=1e-5)
    assert (np.flatnonzero(np.diff(rows["step"]) != 1) + 1).tolist() == [10, 35, 45] and (np.diff(rows["step"]) > 0).all()
    table = load_file(next((tmp_path / "out/train").glob("index-*.safetensors")))
    assert (table["step:values"] == rows["step"]).all()
    monthly = reanalysis()[["t2m"]].assign_coords(time=np.arange("2000-01", "2003-05", dtype="M8[M]").astype("M8[ns]"))
    monthly.to_netcdf(tmp_path / "monthly.nc", engine="h5netcdf")
    assert convert(tmp_path / "monthly.nc", tmp_path / "months", "--forecast")["interval"] == [1, "months"]
    for run in range(2):                                                        # which restart the clock
        np.save(tmp_path / f"files/run{run}.npy", draw(12, 16, 16, seed=run))
    for path in tmp_path.glob("files/*.nc"):
        path.unlink()
    index = convert(tmp_path / "files", tmp_path / "runs", "--forecast", "--variables", "w", "--validation", "0.2")
    assert index["interval"] == [1, "frames"] and not index["weighted"] and not (tmp_path / "runs/static.safetensors").exists()
    assert np.flatnonzero(np.diff(columns(tmp_path / "runs/train")["step"]) != 1).tolist() == [11]


@pytest.mark.parametrize(("change", "options", "message"), [
    (None, ["--fill", "q=1"], "--fill q: the variables are t2m tp z"), (None, ["--coarse-variables", "z"], "low is the mean of"),
    (None, ["--static", "lsm"], "has no such variable over latitude and longitude alone; it has none"),
    (lambda x: x.update({"flat": (("latitude", "longitude"), np.ones((HEIGHT, WIDTH)))}), ["--static", "flat"], "flat is 1 in all"),
    (lambda x: x.update({"lsm": (("latitude", "longitude"), np.full((HEIGHT, WIDTH), np.nan))}), ["--static", "lsm"],
     "lsm has no value in 100.0% of its cells"),
    (lambda x: x.t2m.values.__setitem__(slice(None), np.nan), ["--mask"], "t2m has no value in any cell"),
    (None, ["--forecast", "--validation", "0.05"], "validation has 2 frames in a row, 6 hours apart, expected 3 or more"),
    (None, ["--forecast", "--coarse", "tests"], "frames have no coarse counterpart"),
    (None, ["--forecast", "--inputs", "tp"], "no inputs; leave out --coarse and --inputs"),
    (lambda x: x.t2m.values.__setitem__((3, 2), np.nan), [], "2020-01-01T18:00: t2m has no value in 5.9% of its cells; give one"),
    (lambda x: x.tp.values.__setitem__(slice(None), -1e-3), ["--transform", "tp=log"], "has no logarithm"),
    (lambda x: x.t2m.values.__setitem__(slice(None), 273), [], "t2m is 273 in all cells"),
    (None, ["--variables", "t2"], "has no variable t2 over latitude, longitude and samples, such as times; it has t2m, tp, z"),
    (None, ["--levels", "300"], "it has 500, 850"), (None, ["--dims", "lat", "lon"], "has no dim lat for --dims"),
    (None, ["--factor", "5", "--multiple", "1"], "longitude has 32 cells, expected a multiple of 5"),
    (None, ["--periodic", "x"], "the sides are latitude longitude"), (None, ["--transform", "q=log"], "the channels are t2m"),
    (None, ["--validation", "1.5"], "expected fractions"), (None, ["--variables", "tp", "--inputs", "tp"], "no variable to"),
])  # fmt: skip
def test_files_and_options_that_do_not_fit_are_refused(
    tmp_path: Path, change: Any, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = reanalysis()
    if change is not None:
        change(dataset)
    dataset.to_netcdf(tmp_path / "x.nc", engine="h5netcdf")
    assert fields.main(["convert", str(tmp_path / "x.nc"), str(tmp_path / "out"), "--workers", "1", *options]) == 2
    assert message in (error := capsys.readouterr().err), error


def test_missing_cells_are_filled_and_odd_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = reanalysis()[["t2m"]]
    dataset.t2m.values[:, :5] = np.nan
    dataset.to_netcdf(tmp_path / "sst.nc", engine="h5netcdf")
    index = convert(tmp_path / "sst.nc", tmp_path / "filled", "--fill", "t2m=271.35")
    first = columns(tmp_path / "filled/train")["high"][0]
    assert Standard.from_header(index).invert(first)[0, -1, 0] == pytest.approx(271.35, abs=1e-3)
    (tmp_path / "files").mkdir()
    for name, content in (("files/a.nc", b"no netcdf"), ("short.npy", b"\x93NUMPY")):
        (tmp_path / name).write_bytes(content)
        assert fields.main(["convert", str((tmp_path / name).parent if "/" in name else tmp_path / name), str(tmp_path / "x")]) == 2
        assert "cannot be read" in capsys.readouterr().err
