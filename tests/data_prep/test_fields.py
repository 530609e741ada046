"""Fields and their coarse counterparts: simulation, resumption, physics and checks."""

import json
import shutil

import h5py
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from data_prep import cosmoflow, fields, scenes, store, turbulence
from data_prep.atmosphere import VARIABLES
from data_prep.sphere import Grid
from hpcai import dist
from hpcai.data.splits import open_split
from hpcai.settings import LoaderConfig
from tests.data_prep.prep_contract import PrepContract, check_fails, columns, content, read_json, runner, set_to

SMALL = ["--kind", "matter", "--size", "16", "--thickness", "4", "--samples", "96", "--rows", "24", "--no-check", "--voxel", "4",
         "--particles-per-cell", "4"]  # fmt: skip

run = runner(fields)


def read_recipe(out):
    settings = read_json(out / "recipe.json")
    del settings["kind"]
    return fields.KINDS[settings["field"]](**settings)


def block_means(values, factor):
    """Return the means of the blocks of a map."""
    low = [[values[i : i + factor, j : j + factor].mean() for j in range(0, values.shape[1], factor)]
           for i in range(0, values.shape[0], factor)]  # fmt: skip
    return np.array(low)


def test_files_have_the_format_that_the_loader_expects(dataset):
    index = read_json(dataset / "train" / "index.json")
    assert index["kind"] == "matter" and index["channels"] == ["density"] and index["shape"] == [1, 16, 16]
    assert index["box"] == [64, 64] and index["periodic"] == [True, True] and index["thickness"] == 16 and index["redshift"] == 0
    assert index["parameters"] == ["Omega_m", "sigma_8", "n_s", "H_0"] and index["units"] == ["", "", "", "km/s/Mpc"]
    assert index["low"] == [0.1, 0.6, 0.864, 63] and index["high"] == [0.5, 1.0, 1.056, 77]
    assert index["fields"]["low"] == {"dtype": "float32", "shape": [1, 4, 4]}
    assert index["fields"]["parameters"] == {"dtype": "float32", "shape": [4], "low": -1, "high": 1}
    requested = {"high": ("float32", (1, 16, 16)), "low": ("float32", (1, 4, 4)), "parameters": ("float32", (4,))}
    split, written = open_split(dataset / "train", requested, "", LoaderConfig(), dist.single_process()), columns(dataset / "train")
    assert len(split) == 84 and split.metadata["mean"] == index["mean"]
    for name, values in split.read(50).items():
        assert (np.asarray(values) == written[name][50]).all()
    split.close()
    for path in dataset.glob("*/*.h5"):
        with h5py.File(path) as file:
            assert file.attrs["undo"] == index["undo"] and list(file.attrs["deviation"]) == index["deviation"]


def test_all_maps_of_a_universe_are_in_one_split(dataset):
    numbers = {}
    for split in ("train", "validation"):
        files = [h5py.File(path) for path in sorted((dataset / split).glob("*.h5"))]
        numbers[split] = [int(number) for file in files for number in file.attrs["numbers"]]
        parameters = columns(dataset / split)["parameters"].reshape(len(numbers[split]), 6, 4)
        assert (parameters == parameters[:, :1]).all() and len(np.unique(parameters[:, 0], axis=0)) == len(numbers[split])
    assert sorted(numbers["train"] + numbers["validation"]) == list(range(16)) and len(numbers["validation"]) == 2


def test_maps_are_slabs_of_a_universe_and_low_is_the_mean_of_its_density(dataset):
    recipe, index = read_recipe(dataset), read_json(dataset / "train" / "index.json")
    with h5py.File(dataset / "train" / "fields_000001.h5") as file:
        number, rows = int(file.attrs["numbers"][2]), {name: file[name][12:18] for name in file}
        assert json.loads(file.attrs["recipe"]) == json.loads(recipe.json_text)
    ends = (0.1, 0.6, 0.864, 63.0), (0.5, 1.0, 1.056, 77.0)
    density = cosmoflow.simulate_density(cosmoflow.Recipe(1, 16, 1, 4.0, (0.0,), 4, 16.0, 0.045, *ends, 0.1, 0.0), number)[0]
    assert density.shape == (16, 16, 16) and density.mean() == pytest.approx(1, rel=1e-9)
    slabs = [density[:4].mean(0), density[8:12].mean(0), density[:, :4].mean(1), density[:, 8:12].mean(1),
             density[..., :4].mean(2), density[..., 8:12].mean(2)]  # fmt: skip
    mean, deviation, floor = index["mean"][0], index["deviation"][0], index["floors"][0]
    for slab, high, low in zip(slabs, rows["high"], rows["low"]):
        assert np.exp(mean + deviation * high[0].astype(float)) - floor == pytest.approx(slab, rel=1e-5, abs=1e-6)
        expected = (np.log(block_means(slab, 4) + floor) - mean) / deviation
        assert low[0] == pytest.approx(expected, abs=1e-5) and abs(expected - block_means(high[0], 4)).max() > 0.05
    low, high = np.array(index["low"]), np.array(index["high"])
    assert low + (rows["parameters"][0] + 1) / 2 * (high - low) == pytest.approx(recipe.universes.physical(number), rel=1e-6)


def test_mean_and_deviation_are_those_of_the_first_training_universes(dataset):
    recipe = read_recipe(dataset)
    first = [number for number in range(30) if recipe.split(number) == "train"][:16]
    values = np.log(np.concatenate([recipe.simulate(number) for number in first]) + 0.05)
    assert [*recipe.mean, *recipe.deviation] == pytest.approx([values.mean(), values.std()], rel=2e-3)
    assert all(float(f"{value:.4g}") == value for value in (*recipe.mean, *recipe.deviation))
    written, statistics = columns(dataset / "train"), read_json(dataset / "statistics.json")["splits"]["train"]
    assert statistics["rows"] == 84 and statistics["high"]["mean"] == pytest.approx([written["high"].mean()], abs=1e-6)
    assert statistics["high"]["deviation"] == pytest.approx([written["high"].std()], rel=1e-5)
    assert statistics["low"]["maximum"] == [written["low"].max()]
    assert abs(statistics["high"]["mean"][0]) < 0.05 and abs(statistics["high"]["deviation"][0] - 1) < 0.05


def test_a_resumed_folder_keeps_its_mean(dataset, tmp_path, monkeypatch):
    out = shutil.copytree(dataset, tmp_path / "same")
    min(out.glob("train/*.h5")).unlink()
    monkeypatch.setattr(fields, "STATISTICS_SIZE", 1)                           # as on another machine, with another mean
    assert run("simulate", out, *SMALL) == 0 and content(out) == content(dataset)
    assert run("simulate", tmp_path / "new", *SMALL) == 0 and read_recipe(tmp_path / "new").mean != read_recipe(dataset).mean


class TestContract(PrepContract):
    run, small = staticmethod(run), SMALL


# ---- physics


def test_volumes_are_full_cubes_and_the_check_tests_conservation(tmp_path, capsys):
    args = ["--kind", "volumes", "--size", "8", "--samples", "32", "--factor", "2"]
    assert run("simulate", tmp_path, *args) == 0
    text = capsys.readouterr().out
    assert "configs/small3d.yaml" in text and "low of 32 samples compared" in text
    index, rows = read_json(tmp_path / "train" / "index.json"), columns(tmp_path / "train")
    assert index["shape"] == [1, 8, 8, 8] and index["box"] == [32] * 3 and "thickness" not in index
    assert rows["low"].shape[1:] == (1, 4, 4, 4) and len(rows["high"]) == len(np.unique(rows["parameters"], axis=0))

    def heavier(file):
        recipe = read_recipe(tmp_path)
        values = 1.01 * recipe.standard.invert(file["high"][0])
        file["high"][0], file["low"][0] = recipe.standard.apply(values), recipe.coarsen(values)

    assert check_fails(run, tmp_path, tmp_path.with_name("heavier"), heavier, "the mean density is off by 0.01")


def test_weather_is_periodic_in_longitude_alone_and_names_its_channels(tmp_path, monkeypatch):
    monkeypatch.setattr(fields, "STATISTICS_SIZE", 4)
    args = ["--kind", "weather", "--samples", "10", "--rows", "8"]
    assert run("simulate", tmp_path, *args) == 0
    assert (tmp_path / "samples.png").is_file()
    index, rows = read_json(tmp_path / "train" / "index.json"), columns(tmp_path / "train")
    assert index["channels"] == ["TMQ", "U850", "V850", "PSL"] and index["channel_units"] == ["kg/m2", "m/s", "m/s", "Pa"]
    assert "no weather model" in index["note"]
    assert index["periodic"] == [False, True] and index["parameters"] == [] and sorted(rows) == ["high", "low"]
    assert rows["high"].shape == (8, 4, 64, 96) and rows["low"].shape == (8, 4, 16, 24)
    for channel, name in enumerate(index["channels"]):
        values = index["mean"][channel] + index["deviation"][channel] * rows["high"][:, channel].astype(float)
        assert VARIABLES[name].minimum < values.min() and VARIABLES[name].least_maximum < values.max() < VARIABLES[name].maximum
        assert rows["low"][2, channel] == pytest.approx(block_means(rows["high"][2, channel], 4), abs=1e-5)
    with h5py.File(tmp_path / "train" / "fields_000000.h5") as file:
        number = int(file.attrs["numbers"][2])
    grid = Grid((np.arange(128) + 0.5) * 180 / 128 - 90, np.arange(0.5, 192) * 360 / 192, True)
    water = block_means(scenes.sample(grid, store.generator(1, 1, number))[..., 0].astype(float), 2)
    assert index["mean"][0] + index["deviation"][0] * rows["high"][2, 0] == pytest.approx(water, rel=1e-5, abs=1e-4)
    requested = {"high": ("float32", (4, 64, 96)), "low": ("float32", (4, 16, 24))}
    split = open_split(tmp_path / "train", requested, "", LoaderConfig(), dist.single_process())
    assert sorted(split.read(0)) == ["high", "low"]
    split.close()
    weights = load_file(tmp_path / "static.safetensors")["weights"]
    assert index["weighted"] and index["static"] == [] and index["interval"] is None and weights.shape == (4, 64, 96)
    area = np.cos(np.radians((np.arange(64) + 0.5) * 180 / 64 - 90))
    assert weights == pytest.approx(np.broadcast_to((area / area.mean())[:, None], weights.shape), rel=1e-5)
    for change in ({"weights": weights[:, 1:]}, {"weights": 2 * weights}, {}):
        save_file(change, tmp_path / "static.safetensors")
        assert run("check", tmp_path, "--no-picture") == 2
    steps = np.abs(np.diff(rows["high"], axis=3, append=rows["high"][..., :1])).mean((0, 1, 2))
    assert steps[-1] < steps[:-1].mean() + 5 * steps[:-1].std()                 # steps across the edge are like those inside


# ---- turbulence


class Unforced(turbulence.Flow):
    def spectrum(self, values):
        """Return the wavenumbers of the flow, of values on its cells."""
        cut = np.fft.rfft2(values)[:, : self.highest + 1]
        return cut * (np.abs(np.fft.fftfreq(self.cells, 1 / self.cells)) <= self.highest)[:, None]


def test_advection_is_that_of_the_velocity_and_conserves_energy_and_enstrophy():
    flow, k = Unforced(32, 0, 0), np.fft.fftfreq(32, 1 / 32)
    x, y = np.arange(17.0), k[:, None]
    w = flow.spectrum(20 * np.random.default_rng(0).standard_normal((32, 32))) / np.maximum(x[:11] ** 2 + y**2, 1)
    w[0, 0] = 0

    def gradient(values, factor):
        return np.fft.irfft2(1j * factor * np.fft.rfft2(values))

    def budgets(w):
        vorticity, stream = flow.to_cells(w), flow.to_cells(w / np.maximum(x[:11] ** 2 + y**2, 1))
        return (stream * vorticity).mean(), (vorticity**2).mean()           # twice the energy, twice the enstrophy

    vorticity, stream = flow.to_cells(w), flow.to_cells(w / np.maximum(x[:11] ** 2 + y**2, 1))
    direct = gradient(stream, x) * gradient(vorticity, y) - gradient(stream, y) * gradient(vorticity, x)    # u = d psi / dy
    assert abs(flow.advect(w) - flow.spectrum(direct)).max() < 1e-12 * abs(flow.spectrum(direct)).max()
    later = w
    for _ in range(50):
        later = flow.step(later, 0.01)
    assert budgets(later) == pytest.approx(budgets(w), rel=1e-7) and abs(flow.to_cells(later) - vorticity).max() > 0.1


def test_a_taylor_green_vortex_decays_at_its_exact_rate():
    flow, cells = Unforced(32, 0.02, 0.1), 2 * np.pi * np.arange(32) / 32
    vortex = np.cos(3 * cells)[:, None] * np.cos(3 * cells)
    w = flow.spectrum(vortex)
    for _ in range(20):
        w = flow.step(w, 0.05)
    assert flow.to_cells(w) == pytest.approx(np.exp(-(0.02 * 18 + 0.1)) * vortex, abs=1e-12)


def test_forced_turbulence_is_steady_and_correlates_with_the_frame_before():
    frames = np.array([turbulence.simulate(128, 4, fields.INTERVAL, store.generator(1, 2, number)) for number in range(3)])
    frames = fields.block_mean(frames, 2, 2)
    assert 2.3 < frames.std() < 3.1 and abs(frames.mean((2, 3))).max() < 1e-12
    correlation = [np.corrcoef(frames[:, n].ravel(), frames[:, n + 1].ravel())[0, 1] for n in range(3)]
    assert np.mean(correlation) == pytest.approx(0.8, abs=0.06)
    k = np.fft.fftfreq(64, 1 / 64)
    shells = np.hypot(k, k[:, None]).round().astype(int).ravel()
    enstrophy = np.bincount(shells, (abs(np.fft.fft2(frames)) ** 2).mean((0, 1)).ravel())
    assert 2 <= enstrophy[:20].argmax() <= 5                                                # the forcing
    slope = np.polyfit(np.log(np.arange(6, 20)), np.log(enstrophy[6:20] / np.arange(6, 20) ** 2), 1)[0]
    assert -5.2 < slope < -3                                                                # Kraichnan 1967: -3; steeper with drag


def test_trajectories_are_in_one_file_and_are_equal_from_any_number_of_processes(tmp_path, capsys):
    out, args = tmp_path / "one", ["--kind", "turbulence", "--size", "16", "--samples", "30", "--frames", "3", "--rows", "6"]
    assert run("simulate", out, *args) == 0 and "configs/turbulence.yaml" in capsys.readouterr().out
    index, rows = read_json(out / "train" / "index.json"), columns(out / "train")
    assert index["factor"] == 0 and index["mean"] == [0] and index["channels"] == ["vorticity"] and not index["weighted"]
    assert index["interval"] == [pytest.approx(0.33 * index["deviation"][0], abs=1e-3), "eddy turnover times"]
    assert sorted(rows) == ["high", "step"] and rows["step"].tolist() == [0, 1, 2] * 8 and not (out / "static.safetensors").exists()
    with h5py.File(out / "train" / "fields_000001.h5") as file:
        frames = turbulence.simulate(32, 3, 0.33, store.generator(1, 2, int(file.attrs["numbers"][1])))
        for values, frame in zip(file["high"][3:, 0], frames):
            assert index["deviation"][0] * values == pytest.approx(block_means(frame, 2), abs=1e-5)
    shutil.copytree(out, tmp_path / "two")
    (tmp_path / "two" / "train" / "fields_000002.h5").unlink()
    assert run("simulate", tmp_path / "two", *args) == 0 and run("simulate", tmp_path / "three", *args, workers="2") == 0
    assert content(out) == content(tmp_path / "two") == content(tmp_path / "three")
    message = "the mean vorticity is off by"
    assert check_fails(run, out, tmp_path / "damaged", lambda file: set_to("high", 1, file["high"][1] + 0.01)(file), message)


# ---- check


@pytest.mark.parametrize("change, message", [
    (set_to("high", 5, np.nan), "'high' row 5 of"), (set_to("parameters", 3, 2), "'parameters' row 3 of"),
    (lambda file: set_to("low", 7, file["low"][7] + 0.001)(file), "row 7: 'low' is 0.001 deviations off"),
])  # fmt: skip
def test_the_check_finds_damage(dataset, tmp_path, change, message):
    assert check_fails(run, dataset, tmp_path / "damaged", change, message, "fields_000000.h5")


@pytest.mark.parametrize("kind", ["convert", "simulate"])
def test_the_check_of_another_data_set_is_refused(dataset, tmp_path, capsys, kind):
    out = shutil.copytree(dataset, tmp_path / "other")
    (out / "recipe.json").write_text(json.dumps({"kind": kind, "size": 8}))
    assert run("check", out) == 2 and "recipe.json is not of data_prep.fields" in capsys.readouterr().err
