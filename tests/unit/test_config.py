"""Settings: defaults, file and overrides, strict types, all errors at once, inconsistencies, and the time of a refused run."""

import datetime
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import hypothesis
import pydantic
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from hpcai import config
from hpcai.config import Settings, dump, load
from hpcai.errors import ConfigError
from hpcai.schema import CONTROL
from hpcai.settings import LoaderConfig, ScheduleConfig, StepConfig, TrainConfig
from tests.reference_data import DATA, load_json

PAGES = DATA / "settings"


class Step(Settings):
    """One optimizer step."""

    lr: float = Field(1e-3, gt=0)
    "Learning rate after the warm-up."
    precision: Literal["fp32", "bf16"] = "fp32"
    clip: float | None = Field(None, gt=0, lt=10)
    micro: int = Field(1, ge=1)
    compile: bool = False
    steps: int = 1000
    warmup: int = 0

    @pydantic.model_validator(mode="after")
    def _warm_up_fits(self) -> "Step":
        if self.warmup > self.steps:
            raise ValueError(f"warmup is {self.warmup}, expected at most steps ({self.steps})")
        return self


class Data(Settings):
    directory: Path
    "Directory of the samples."
    shape: tuple[int, int, int] = (128, 128, 128)
    names: tuple[str, ...] = ()
    weights: dict[str, float] = {"a": 1.0}
    cache: Path = Path("cache")


class Average(Settings):
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    folder: Path = Path("average")


class Config(Settings):
    """A run of the tests."""

    name: str = "run"
    step: Step = Step(precision="bf16")
    data: Data
    average: Average | None = None
    threads: int | Literal["auto"] = "auto"
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field((1,), min_length=1)
    label: str | None = None

    @pydantic.field_validator("name")
    @classmethod
    def _no_blank(cls, name: str) -> str:
        if " " in name:
            raise ValueError("expected a name without blanks")
        return name


REQUIRED = "data.directory=here"


def load_errors(*overrides: str, path: Path | None = None, schema: Any = Config) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(schema, path, overrides)
    return str(caught.value).splitlines()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "small.yaml") -> Path:
        Path(name).write_text(text)
        return Path(name)

    return write


# ---- Defaults, file, overrides ------------------------------------------------------------------------------------------------


def test_overrides_precede_the_file_and_the_file_precedes_defaults(file):
    path = file("step:\n  lr: 0.5\n  micro: 2\ndata:\n  directory: a b\n")
    settings = load(Config, path, ["step.lr=2e-3", "data.shape=[1,2,3]", "step.lr=3e-3"])
    assert settings.step == Step(lr=3e-3, micro=2, precision="bf16")
    assert settings.data == Data(directory=Path("a b"), shape=(1, 2, 3))


def test_other_defaults_give_way_to_the_file_and_to_overrides(file):
    path = file("data: {directory: here}\nstep: {lr: 0.1, steps: 0}\n")
    defaults = ["step={lr: 0.2, micro: 2, steps: 5}", "name=other", "seeds=[3]"]
    with pytest.raises(ConfigError, match="warmup is 1, expected at most steps"):
        load(Config, path, ["step.warmup=1"], defaults)
    cfg = load(Config, path, ["name=mine"], defaults)
    assert (cfg.step.lr, cfg.step.micro, cfg.step.steps, cfg.name, cfg.seeds) == (0.1, 2, 0, "mine", (3,))


def test_an_override_keeps_the_other_keys_of_a_section():
    assert load(Config, None, [REQUIRED, "step.micro=4"]).step == Step(precision="bf16", micro=4)
    assert load(Config, None, [REQUIRED, "average.decay=0.5"]).average == Average(decay=0.5)


def test_overrides_merge_into_a_mapping_and_replace_a_list(file):
    path = file("step: {lr: 0.5, micro: 2}\ndata: {directory: x, names: [a, b], weights: {b: 2}}\n")
    settings = load(Config, path, ["step={micro: 3}", "data.names=[c]", "data.weights={c: 3}"])
    assert (settings.step.lr, settings.step.micro) == (0.5, 3)
    assert settings.data.names == ("c",)
    assert settings.data.weights == {"b": 2.0, "c": 3.0}
    assert load(Config, None, [REQUIRED, "data.weights.c=3"]).data.weights == {"c": 3.0}, "the default is replaced, not merged"


def test_null_turns_a_section_off_and_an_override_below_turns_it_on(file):
    assert load(Config, None, [REQUIRED, "average.decay=0.5", "average=null"]).average is None
    assert load(Config, file("average: null\n"), [REQUIRED, "average.decay=0.5"]).average == Average(decay=0.5)


def test_an_empty_section_or_file_keeps_its_defaults(file):
    assert load(Config, file("# nothing\n"), [REQUIRED]) == load(Config, None, [REQUIRED])
    assert load(Config, file("step:\n#  lr: 1\ndata: {directory: x}\n")).step == Step(precision="bf16")
    assert load_errors(REQUIRED, path=file("step: null\n")) == [
        "small.yaml:1: step is null, expected a section (lr, precision, clip, micro, compile, steps, warmup)"
    ]


# ---- Values -------------------------------------------------------------------------------------------------------------------


class Renamed(Settings):
    renamed = {"average": "ema_decay"}
    ema_decay: float = 0.0


class Run(Settings):
    step: Renamed = Renamed()
    steps: int = 0


def test_earlier_names_are_read_and_reported(file, capsys):
    for path, overrides, origin in ((file("step:\n  average: 0.9"), [], ":2: "), (None, ["step={average: 0.9}"], "command line: ")):
        assert load(Run, path, overrides) == Run(step=Renamed(ema_decay=0.9))
        message = capsys.readouterr().err
        assert origin in message and "step.average is now step.ema_decay; the next version does not read the old name\n" in message
    assert load(Run, file("step: {ema_decay: 0.8}"), ["step.average=0.9"]).step.ema_decay == 0.9
    with pytest.raises(ConfigError, match=r"command line: step.ema_decay is 'x', expected a number"):
        load(Run, None, ["step.average=x"])
    with pytest.raises(ConfigError, match=r"step.average: no such key"):
        load(Run, file("step: {average: 0.9, ema_decay: 0.8}"))


@pytest.mark.parametrize(("text", "value"), [
    ("1e-3", 1e-3), ("1E5", 1e5), (".5", 0.5), ("5.", 5.0), ("3", 3.0), ("-1.5e+2", -150.0), (".inf", math.inf),
    ("-.INF", -math.inf),
])  # fmt: skip
def test_floats(text, value):
    assert load(Everything, None, [f"number={text}"]).number == value


@pytest.mark.parametrize(("text", "message"), load_json("refused/settings_values"))
def test_infinity_control_characters_and_tags_are_rejected(text, message):
    with pytest.raises(ConfigError, match=message):
        load(Everything, None, [text])


def test_a_settings_file_is_a_regular_file_of_bounded_size(tmp_path):
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "large.yaml").write_bytes(b"#" * (5 << 20))
    for name, message in (("fifo.yaml", "cannot be read: is no regular file"), ("large.yaml", "has 5,242,880 bytes, more than")):
        with pytest.raises(ConfigError, match=message):
            load(Config, tmp_path / name, [REQUIRED])


@pytest.mark.parametrize("text", ["no", "yes", "on", "off", "1_000", "1:30:00", "2024-01-01", "0o9", "1e", "+", "=", "<<"])
def test_text_that_yaml_1_1_would_read_as_something_else(text):
    assert load(Config, None, [REQUIRED, f"label={text}"]).label == text


@pytest.mark.parametrize(("text", "value"), [("010", 10), ("0x10", 16), ("0o10", 8), ("-7", -7)])
def test_integers(text, value):
    assert load(Config, None, [REQUIRED, f"threads={text}"]).threads == value


@pytest.mark.parametrize(("override", "message"), load_json("settings/overrides").items())
def test_a_wrong_override(override, message):
    assert load_errors(REQUIRED, override) == [f"command line: {message}"]


def test_a_path_with_an_equals_sign_and_a_value_with_one(file):
    Path("lr=1").mkdir()
    path = file("data: {directory: x}\n", "lr=1/small.yaml")
    assert config._is_file("./" + str(path)) and not config._is_file("data.directory=/a/b.yaml")
    assert load(Config, None, ["data.directory=/a=b.yaml"]).data.directory == Path("/a=b.yaml")


# ---- The file -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "message"), load_json("refused/settings_files"))
def test_a_wrong_file(file, text, message):
    assert load_errors(REQUIRED, path=file(text)) == [message]


def test_a_missing_file(file):
    file("", "small.yaml"), file("", "large.yml"), file("", "notes.txt")
    assert load_errors(REQUIRED, path=Path("smal.yaml")) == ["smal.yaml: no such file; did you mean small.yaml?"]
    assert load_errors(REQUIRED, path=Path("small")) == ["small: no such file; did you mean small.yaml?"]
    assert load_errors(REQUIRED, path=Path("qq.yaml")) == ["qq.yaml: no such file; its directory has large.yml, small.yaml"]
    assert load_errors(REQUIRED, path=Path("no/x.yaml")) == ["no/x.yaml: no such file; there is no directory no"]
    assert load_errors(REQUIRED, path=Path()) == [".: cannot be read: Is a directory"]


# ---- All errors at once -------------------------------------------------------------------------------------------------------


def test_all_errors_of_file_and_overrides_together(file):
    overrides = ["step.micro=0", "other.yaml", "--x=1", "data.foldr=1", "threads=many"]
    lines = load_errors(*overrides, path=file((PAGES / "wrong.yaml").read_text()))
    assert lines == (PAGES / "wrong.txt").read_text().splitlines()


def test_validators_run_despite_unknown_keys_and_name_both_origins(file):
    path = file("step:\n  warmup: 20\n  qqq: 1\n")
    assert load_errors(REQUIRED, "step.steps=10", "name=a b", path=path) == [
        "small.yaml:1, command line: step: warmup is 20, expected at most steps (10)",
        "small.yaml:3: step.qqq: no such key; the keys here are lr, precision, clip, micro, compile, steps, warmup",
        "command line: name: expected a name without blanks",
    ]


# ---- Frozen settings, round trip ----------------------------------------------------------------------------------------------


def test_settings_are_frozen_and_strict_in_python_too():
    step = Step()
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        step.lr = 1.0
    for invalid in ({"lr": True}, {"lr": "3"}, {"micro": 2.0}, {"qqq": 1}):
        with pytest.raises(pydantic.ValidationError):
            Step(**invalid)


TRAPS = ["no", "1e3", "null", "", "~", "010", "1_000", "true", "Yes", "1:30", "2024-01-01", "=", "<<", " a", "a: b", "#", "-", "*"]
TEXT = st.text(max_size=12) | st.sampled_from([*TRAPS, "\n", "\x85", "\ufeff", "\0"])
FLOAT = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([1e-05, 1e300, 5e-324, -0.0, 1e16])
PATHS = TEXT.filter(lambda text: not CONTROL.search(text)).map(Path)


class Everything(Settings):
    text: str = "x"
    label: str | None = None
    number: Annotated[float, Field(allow_inf_nan=True)] = 0.0
    count: int = 0
    flag: bool = False
    path: Path = Path("x")
    names: tuple[str, ...] = ("a",)
    nested: tuple[tuple[str, ...], ...] = ()
    table: dict[str, float] = {"a": 1.0}
    numbered: dict[int, str] = {}
    day: datetime.date | None = None
    either: float | Literal["auto"] | tuple[int, ...] = "auto"
    average: Average | None = None


AVERAGE = st.builds(Average, decay=st.floats(0, 1, exclude_min=True, exclude_max=True), folder=PATHS)
EVERYTHING = st.builds(
    Everything, text=TEXT, label=st.none() | TEXT, number=FLOAT | st.sampled_from([math.inf, -math.inf]), count=st.integers(),
    flag=st.booleans(), path=PATHS,
    names=st.lists(TEXT).map(tuple), nested=st.lists(st.lists(TEXT).map(tuple)).map(tuple), table=st.dictionaries(TEXT, FLOAT),
    numbered=st.dictionaries(st.integers(), TEXT), day=st.none() | st.dates(), average=st.none() | AVERAGE,
    either=FLOAT | st.just("auto") | st.lists(st.integers()).map(tuple),
)  # fmt: skip


@hypothesis.settings(max_examples=40)
@given(EVERYTHING)
def test_dumped_settings_load_equal(tmp_path_factory, settings):
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(dump(settings), encoding="utf-8")
    assert load(Everything, path) == settings


@given(TEXT)
def test_dumped_text_is_text_for_a_yaml_1_1_reader_too(text):
    assert yaml.safe_load(dump(Everything(text=text)))["text"] == text


# ---- The command line ---------------------------------------------------------------------------------------------------------

APP = '''
"""An app."""
import sys
from pathlib import Path
from pydantic import Field
from hpcai import errors
from hpcai.config import Settings, run

class Step(Settings):
    """One optimizer step."""
    lr: float = Field(1e-3, gt=0)
    "Learning rate after the warm-up, which is described here at such a length that it needs more than one line of the page."
    fail: str = ""

class Config(Settings):
    """An app of the tests."""
    step: Step = Step()
    data: Path = Path("no where")

def main(cfg: Config) -> None:
    if cfg.step.fail == "exit":
        raise SystemExit(7)
    if cfg.step.fail:
        raise getattr(errors, cfg.step.fail)("it failed")
    print("ran", cfg.step.lr)

if __name__ == "__main__":
    try:
        run(Config, main)
    finally:
        heavy = [name for name in ("torch", "numpy", "rich") if name in sys.modules]
        if heavy:
            sys.exit(f"imported: {heavy}")
'''


@pytest.fixture
def app(tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").touch()
    (tmp_path / "app" / "__main__.py").write_text(APP)
    root = str(Path(config.__file__).parents[1])

    def call(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "app", *args],
            cwd=tmp_path, env=os.environ | {"PYTHONPATH": root} | env, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    call.root = tmp_path
    return call


def test_a_run_and_a_refused_run(app):
    (app.root / "small.yaml").write_text("step:\n  lr: 0.5\n")
    process = app("small.yaml", "data=x")
    assert (process.returncode, process.stdout, process.stderr) == (0, "ran 0.5\n", "")
    process = app("lr=1", "small.yaml", "step.lr=0", "--foo", "small.yaml")
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == (
        "4 mistakes in the settings (--help lists every key):\n"
        "  command line: lr: no such key; did you mean step.lr?\n"
        "  command line: step.lr is 0, expected a number > 0\n"
        "  command line: --foo: no such option; the options are --show and --help, settings are written key=value\n"
        "  command line: small.yaml: a second file; one run has one file, here small.yaml\n"
    )


def test_shown_settings_can_be_run(app):
    shown = app("--show", "step.lr=1e-5", "data=a b")
    assert (shown.returncode, shown.stderr) == (0, "")
    (app.root / "shown.yaml").write_text(shown.stdout)
    assert app("shown.yaml", "--show").stdout == shown.stdout
    assert app("shown.yaml").stdout == "ran 1e-05\n"


class WithNotes(Settings):
    rows: int = 3

    def notes(self) -> list[str]:
        return [f"{self.rows} rows:", "  more"]


def test_notes_of_settings_are_shown_as_comments(capsys):
    config.run(WithNotes, print, ["rows=5", "--show"])
    assert capsys.readouterr().out == "rows: 5\n# 5 rows:\n#   more\n"


def test_help_lists_every_key(app):
    process = app("--help", "step.lr=wrong", COLUMNS="90")
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout == (PAGES / "help.txt").read_text()
    assert max(map(len, app("-h", COLUMNS="60").stdout.partition("top level")[2].splitlines())) <= 66


ONE_MISTAKE = "1 mistake in the settings (--help lists every key):"


@pytest.mark.parametrize(
    ("args", "code", "stderr"),
    [("step.fail=ConfigError", 2, "error: it failed\n"), ("step.fail=MeshError", 2, "error: it failed\n"),
     ("step.fail=LaunchError", 2, "error: it failed\n"), ("step.fail=DataError", 1, "error: it failed\n"),
     ("step.fail=exit", 7, ""),
     ("step.lr=x --show", 2, f"{ONE_MISTAKE}\n  command line: step.lr is 'x', expected a number > 0\n")],
)  # fmt: skip
def test_exit_codes(tmp_path, capsys, args, code, stderr):
    (tmp_path / "app.py").write_text(APP)
    namespace = runpy.run_path(str(tmp_path / "app.py"))
    with pytest.raises(SystemExit) as exit_info:
        config.run(namespace["Config"], namespace["main"], args.split())
    assert (exit_info.value.code, capsys.readouterr()) == (code, ("", stderr))


# ---- Shared settings


@pytest.mark.parametrize(
    "kind, kwargs, text",
    [
        (StepConfig, {"precision": "fp64", "moments": "bf16"}, "moments bf16 with precision fp64"),
        (StepConfig, {"capture": "whole", "shard": "weights"}, "capture whole with shard weights is not supported"),
        (StepConfig, {"shard_within": 2}, "shard_within is 2, but nothing is sharded"),
        (StepConfig, {"clip_per": "sample", "clip": 0.1, "shard": "weights"}, "clip_per is sample, but shard is weights"),
        (LoaderConfig, {"scatter": True, "reader": "gds"}, "reader gds gives samples on the GPU of each process; set scatter to"),
        (ScheduleConfig, {"decay": "steps", "decay_at": (3.0, 1.0), "decay_to": (0.5, 0.1)}, "must rise"),
        (TrainConfig, {"metric": "x", "better": "higher", "hopeless": 0.9, "target": 0.5}, "hopeless 0.9 is better than"),
    ],
)
def test_inconsistent_settings_are_an_error(kind: type[Settings], kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        kind(**kwargs)


def test_samples_read_by_gds_are_not_sent() -> None:
    cases: tuple[dict[str, Any], ...] = {}, {"scatter": True}, {"reader": "gds"}
    assert [LoaderConfig(**kwargs).loader_kwargs()["scatter"] for kwargs in cases] == ["auto", True, False]
