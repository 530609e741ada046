"""The settings of a run: one frozen, validated object from defaults, a YAML file and ``key=value`` overrides, in this order.

    class Step(Settings):
        lr: float = Field(1e-3, gt=0)
        "Learning rate after the warm-up."

    class Config(Settings):
        step: Step = Step()

    run(Config, main)                    # python -m apps.x [small.yaml] [step.lr=2e-3 ...] [--show] [--help]

Files and overrides are YAML 1.2 (core schema) without aliases. Only ``true`` and ``false`` are booleans, not ``no`` and ``on``.
``1e-3`` is a number and ``010`` is ten; ``1_000``, ``1:30`` and dates are text. An override replaces only its key, and a mapping
only its keys: ``step={lr: 1}`` means ``step.lr=1``. A list, or the default of a ``dict``, is replaced completely. The last override
of a key counts. All errors are reported together, those of the file first.
"""

import json
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import reduce
from importlib import import_module
from operator import getitem
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, cast

import pydantic
import yaml
from pydantic_core import to_jsonable_python

from hpcai import startup
from hpcai.errors import ConfigError, HpcaiError, LaunchError, MeshError, describe_unwritable
from hpcai.json_file import read_regular
from hpcai.schema import CONTROL, NUMBER, Key, Schema, close_matches, format_key, format_value, join_names
from hpcai.stop import end_in_one_line, exit_on_signal, ignore_broken_pipe

T = TypeVar("T", bound=pydantic.BaseModel)

# The most frequent ranges of settings.
PositiveInt = Annotated[int, pydantic.Field(ge=1)]
NonNegativeInt = Annotated[int, pydantic.Field(ge=0)]
PositiveFloat = Annotated[float, pydantic.Field(gt=0)]
NonNegativeFloat = Annotated[float, pydantic.Field(ge=0)]
Rate = Annotated[float, pydantic.Field(ge=0, lt=1)]
UnitInterval = Annotated[float, pydantic.Field(ge=0, le=1)]


class Settings(pydantic.BaseModel):
    """The base of every settings class: frozen, finite, no unknown keys, no conversion (``true`` and ``"3"`` are not numbers).

    The docstring of a field is its text in ``--help``. A section without a default has the defaults of its class. In Python a
    field takes exactly its type, such as a tuple or a ``Path``.
    """

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False,
        ser_json_inf_nan="constants",
        json_schema_extra=lambda schema, kind: schema.update(renamed=kind.renamed),
    )  # fmt: skip
    renamed: ClassVar[dict[str, str]] = {}
    """Earlier names of fields, which files and overrides of the previous version have, and today's."""

    @pydantic.field_validator("*")
    @classmethod
    def _has_no_control_character(cls, value: Any) -> Any:
        if isinstance(value, Path) and CONTROL.search(str(value)):
            raise ValueError("a path must not contain control characters")
        return value

    def notes(self) -> list[str]:
        """Return lines that ``--show`` prints as comments below the settings: derived quantities, such as memory."""
        return []


def load(schema: type[T], path: str | Path | None = None, overrides: Sequence[str] = (), defaults: Sequence[str] = ()) -> T:
    """Build ``schema`` from its defaults, ``key=value`` texts in place of some of them, the YAML file ``path`` and overrides.

    Raises ConfigError with all errors, one per line: the location, the dotted key, the value and the expected values.
    """
    user_input = _Input(schema, path)
    for default in defaults:
        user_input.add_override(-1, default)
    if path is not None:
        user_input.read(Path(path))
    for number, override in enumerate(overrides):
        user_input.add_override(number, override)
    return cast(T, user_input.validate())


def dump(settings: pydantic.BaseModel | Mapping[str, Any]) -> str:
    """Return YAML of every key, including defaults, from which ``load`` restores an equal object."""
    tree = to_jsonable_python(settings, inf_nan_mode="constants")
    return str(yaml.dump(tree, Dumper=_Writer, sort_keys=False, allow_unicode=True, width=120))


def run(schema: type[T], main: Callable[[T], None], argv: Sequence[str] | None = None, advice: str = "", **commands: str) -> None:
    """Call ``main`` with the settings of the command line: ``[file.yaml] [key=value ...] [--show] [--help]``.

    ``commands``: the modules of further commands, by the first word of the command line; their ``run`` has the other arguments.
    ``advice``: How an interrupted program goes on.

    Exit codes: 2 for wrong settings, mesh or launch, 1 for any other HpcaiError, 130 for Ctrl-C, 85 for a run that was stopped by a
    signal and should be restarted (``hpcai.stop``).
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if args and args[0] in commands:
        import_module(commands[args[0]]).run(args[1:])
        return
    if "--help" in args or "-h" in args:
        ignore_broken_pipe(Schema(schema).write_help)
        return
    show = "--show" in args
    args = [arg for arg in args if arg != "--show"]
    files = [arg for arg in args if _is_file(arg)]
    if files:
        args.remove(files[0])
    in_program = argv is None  # a notebook, which passes argv, keeps its signals and has no start time
    with ExitStack() as stack:
        if in_program:
            spec = getattr(main, "__globals__", {}).get("__spec__")  # None: of a script
            name = Path(sys.argv[0]).name if spec is None else spec.name.removesuffix(".__main__")
            stack.enter_context(end_in_one_line(name, advice, (signal.SIGINT,)))
            stack.enter_context(exit_on_signal())
        stack.enter_context(startup.clock(startup.process_age() if in_program else 0.0))
        _run(schema, main, files, args, show)


def _run(schema: type[T], main: Callable[[T], None], files: Sequence[str], overrides: Sequence[str], show: bool) -> None:
    try:
        try:
            settings = load(schema, files[0] if files else None, overrides)
        except ConfigError as problem:
            lines = str(problem).splitlines()
            count = "1 mistake" if len(lines) == 1 else f"{len(lines)} mistakes"
            sys.stderr.write("\n  ".join([f"{count} in the settings (--help lists every key):", *lines]) + "\n")
            raise SystemExit(2) from None
        if show:
            notes = settings.notes() if isinstance(settings, Settings) else []
            ignore_broken_pipe(lambda: sys.stdout.write(dump(settings) + "".join(f"# {line}\n" for line in notes)))
        else:
            main(settings)
    except HpcaiError as problem:
        sys.stderr.write(f"error: {problem}\n")
        raise SystemExit(2 if isinstance(problem, ConfigError | MeshError | LaunchError) else 1) from None
    except OSError as problem:
        sys.stderr.write(f"error: {describe_unwritable(problem, 'a file of this run')}\n")
        raise SystemExit(1) from None


# ---- YAML ---------------------------------------------------------------------------------------------------------------------

_TAG = "tag:yaml.org,2002:"
_SCALARS = [  # YAML 1.2, section 10.3.2
    ("null", re.compile(r"(null|Null|NULL|~|)$"), ["n", "N", "~", ""]),
    ("bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    ("int", re.compile(r"([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), "-+0123456789"),
    ("float", re.compile(NUMBER.pattern + r"$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"), "-+.0123456789"),
]


_MAX_BYTES = 4 << 20  # of a file of settings
_MAX_DEPTH = 64  # of lists and mappings in brackets


class YamlReader(yaml.SafeLoader):
    """A loader of YAML 1.2 without aliases, bounded in depth."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):  # a few lines of them may expand to more values than fit into memory
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="settings have no aliases; write the value again", problem_mark=mark)
        return super().compose_node(parent, index)

    def fetch_flow_collection_start(self, kind: type[yaml.Token]) -> None:
        if self.flow_level == _MAX_DEPTH:  # the time of the scanner is that of the square of the depth
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=self.get_mark())
        super().fetch_flow_collection_start(kind)


class _Writer(yaml.SafeDumper):
    """A dumper that quotes text which YAML 1.1 or YAML 1.2 would parse as another type, for any reader."""


for _kind, _pattern, _first in _SCALARS:
    YamlReader.add_implicit_resolver(_TAG + _kind, _pattern, _first)
    _Writer.add_implicit_resolver(_TAG + _kind, _pattern, _first)
_Writer.add_representer(  # the emitter folds a line separator of Unicode into a space
    str, lambda writer, text: writer.represent_scalar(_TAG + "str", text, style='"' if len((text + ".").splitlines()) > 1 else None)
)
_Writer.add_representer(
    list,
    lambda writer, items: writer.represent_sequence(
        _TAG + "seq", items, flow_style=not any(isinstance(item, list | dict) for item in items)
    ),
)


def _scalar(node: yaml.ScalarNode) -> Any:
    text, kind = node.value, node.tag.removeprefix(_TAG)
    if kind == "str":
        text.encode()  # ValueError for an escaped surrogate
        return text
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if kind == "float" and not text.lower().endswith("nan"):
        return float(text.replace(".inf", "inf").replace(".Inf", "inf").replace(".INF", "inf"))
    raise ValueError(f"{text} is no valid setting" if kind == "float" else f"the tag {node.tag} is unknown")


# ---- Input and its locations --------------------------------------------------------------------------------------------------


class _Origin(NamedTuple):
    """The location of a value. Origins are sorted by file before overrides, then by line or position."""

    source: int  # 0: file, 1: override
    line: int
    text: str


class _Input:
    """The tree of all values of the user, the origin of each key, and the errors."""

    def __init__(self, kind: type[pydantic.BaseModel], path: str | Path | None) -> None:
        self.kind, self.schema, self.path = kind, Schema(kind), path
        self.tree: dict[str, Any] = {}
        self.origins: dict[Key, _Origin] = {(): _Origin(0, 0, str(path)) if path is not None else _Origin(1, -1, "command line")}
        self.errors: list[tuple[_Origin, str]] = []
        self.rejected: set[Key] = set()  # with an error already: the value is ignored
        self.readable = True

    def read(self, path: Path) -> None:
        """Add the file. An unreadable one is an error as any other, so that overrides are still checked."""
        origin = self.origins[()]
        try:
            node = yaml.compose(read_regular(path, _MAX_BYTES).decode(), Loader=YamlReader)
            if node is None or isinstance(node, yaml.MappingNode):
                self.add({} if node is None else self.to_plain(node, (), self.line))
                return
            error = f"found {format_value(self.to_plain(node, (), self.line))}, expected key: value lines"
        except FileNotFoundError:
            error = f"no such file; {_suggest_file(path)}"
        except OSError as problem:
            error = f"cannot be read: {problem.strerror}"
        except yaml.MarkedYAMLError as problem:
            if mark := problem.problem_mark:
                origin = _Origin(0, mark.line + 1, f"{self.path}:{mark.line + 1}:{mark.column + 1}")
            error = f"not YAML: {problem.problem}" + ("; indent with spaces, not tabs" if "'\\t'" in str(problem.problem) else "")
        except RecursionError:
            error = "nested too deeply"
        except (UnicodeDecodeError, yaml.YAMLError) as problem:
            error = f"not YAML: {' '.join(str(problem).split())}"
        self.readable = False
        self.errors.append((origin, error))

    def line(self, node: yaml.Node) -> _Origin:
        line = node.start_mark.line + 1
        return _Origin(0, line, f"{self.path}:{line}")

    def add_override(self, number: int, override: str) -> None:
        name, equals, text = override.partition("=")
        origin, error = _Origin(1, number, "command line"), ""
        if override.startswith("-") and equals:
            error = f"{override}: settings are written without dashes: {override.lstrip('-')}"
        elif override.startswith("-"):
            error = f"{override}: no such option; the options are --show and --help, settings are written key=value"
        elif _is_file(override):
            error = f"{override}: a second file; one run has one file" + (f", here {self.path}" if self.path else "")
        elif CONTROL.search(override):
            error = f"{override!r}: contains a control character; write it without"
        elif not equals or not re.fullmatch(r"[^\s.]+(\.[^\s.]+)*", name):
            error = f"{override}: expected key=value, such as step.lr=1e-3, or one file.yaml"
        else:
            error = self.assign(name, text, origin)
        if error:
            self.errors.append((origin, error))

    def assign(self, name: str, text: str, origin: _Origin) -> str:
        """Assign ``text``, parsed as YAML, to the dotted ``name``, and return the error, or an empty text."""
        key: Key = tuple(name.split("."))
        tree: Any = None
        error = ""
        for length in range(1, len(key) + 1):
            self.origins.setdefault(key[:length], origin)
        try:
            node = yaml.compose(text, Loader=YamlReader)
            if node is None:
                error = f"{name}={text} has no value; write {name}=null for none, or '{name}=\"\"' for empty text"
            else:
                tree = self.to_plain(node, key, lambda node: origin)
        except (yaml.YAMLError, RecursionError) as problem:
            reason = getattr(problem, "problem", None) or " ".join(str(problem).split())
            error = f"{name}={text} is not YAML ({reason}); text is put in quotes: '{name}=\"{text}\"'"
        if error:
            self.rejected.add(key)
        if not isinstance(tree, dict):
            self.origins[key] = origin
        for part in reversed(key):
            tree = {part: tree}
        self.add(tree)
        return error

    def to_plain(self, node: yaml.Node, key: Key, origin_of: Callable[[yaml.Node], _Origin]) -> Any:
        """Return the value of a YAML node."""
        if isinstance(node, yaml.ScalarNode):
            sections = [*map(self.schema.section, self.schema.at(key))]
            if node.value == "" and node.style is None and node.tag == f"{_TAG}null" and sections not in ([], [None]):
                return {}  # a section with all lines commented out
            try:
                return _scalar(node)
            except ValueError as problem:
                self.errors.append((origin_of(node), f"{format_key(key)}: {problem}; write a plain value"))
                self.rejected.add(key)
                return None
        pairs = enumerate(node.value) if isinstance(node, yaml.SequenceNode) else node.value
        tree: dict[Any, Any] = {}
        for name, child in pairs:
            word = name if isinstance(name, int) else str(name.value)
            below, origin = (*key, word), origin_of(child if isinstance(name, int) else name)
            if isinstance(name, yaml.CollectionNode):
                self.errors.append((origin, f"{format_key(key)}: a key must be a plain name"))
            elif word in tree:
                first = self.origins[below]
                where = f"written twice, first in {first.text}" if first.source == 0 else "written twice"
                self.errors.append((origin, f"{format_key(below)} is {where}; keep one"))
            else:
                self.origins[below] = origin
                tree[word] = self.to_plain(child, below, origin_of)
        return list(tree.values()) if isinstance(node, yaml.SequenceNode) else tree

    def add(self, tree: dict[str, Any]) -> None:
        """Merge a file or an override, with today's names in place of earlier ones."""
        for old, new in self.schema.apply_renames(tree):
            self.origins[new] = origin = self.origin(old)
            self.rejected |= {new} if old in self.rejected else set()
            text = f"{format_key(old)} is now {format_key(new)}; the next version does not read the old name"
            sys.stderr.write(f"{origin.text}: {text}\n")
        self.merge(tree, self.tree)

    def merge(self, tree: dict[str, Any], into: dict[str, Any]) -> None:
        for name, value in tree.items():
            if isinstance(value, dict) and isinstance(old := into.get(name), dict):
                self.merge(value, old)
            else:
                into[name] = value

    def origin(self, key: Key) -> _Origin:
        while key not in self.origins:
            key = key[:-1]
        return self.origins[key]

    def validate(self) -> pydantic.BaseModel:
        suggested: set[Key] = set()
        for key in list(self.schema.unknown_keys(self.tree)):
            near, parent = self.schema.suggest(key), reduce(getitem, key[:-1], cast(Any, self.tree))
            suggested |= set(near)
            names = [name for option in self.schema.at(key[:-1]) for name in option.get("properties", ())]
            hint = f"did you mean {' or '.join(map(format_key, near))}?" if near else f"the keys here are {join_names(names)}"
            self.errors.append((self.origin(key), f"{format_key(key)}: no such key; {hint}"))
            del parent[key[-1]]
        tree = self.schema.fill_defaults(self.tree)
        try:
            settings = self.kind.model_validate_json(json.dumps(tree), strict=True)
        except pydantic.ValidationError as problem:
            self.add_errors(problem.errors(include_url=False), tree, suggested)
        if self.errors:
            raise ConfigError("\n".join(f"{origin.text}: {text}" for origin, text in sorted(self.errors, key=lambda p: p[0][:2])))
        return settings

    def add_errors(self, errors: Sequence[Any], tree: Any, suggested: set[Key]) -> None:
        """Add the errors of pydantic, one for each key."""
        first_errors: dict[tuple[Key, str], Any] = {}
        for error in errors:
            first_errors.setdefault(_locate(error, tree), error)
        for (key, kind), error in first_errors.items():
            origin = self.origin(key)
            if key in self.rejected or (kind in ("rule", "missing") and not self.readable):
                continue  # reported already, or the unreadable file may contain the value
            if kind == "rule":
                if origin.source == 0 and any(o.source == 1 for k, o in self.origins.items() if k[: len(key)] == key):
                    origin = origin._replace(text=f"{origin.text}, command line")
                sentence = " ".join(str(error["ctx"]["error"]).split())
                self.errors.append((origin, f"{format_key(key)}: {sentence}" if key else sentence))
            elif kind == "wrong":
                self.errors.append((origin, self.schema.error_message(key, reduce(getitem, key, tree))))
            elif key not in suggested:
                expected = self.schema.describe(self.schema.at(key))
                self.errors.append((origin, f"{format_key(key)} is missing, expected {expected}"))


def _locate(error: Any, tree: Any) -> tuple[Key, str]:
    """Return the key of a pydantic error, whose ``loc`` also names branches of unions, and the kind of error."""
    key: Key = ()
    for name in error["loc"]:
        if not (name in tree if isinstance(tree, dict) else isinstance(tree, list) and name in range(len(tree))):
            break
        key, tree = (*key, name), tree[name]
    if error["type"] == "missing" and isinstance(tree, dict):
        return (*key, error["loc"][-1]), "missing"
    return key, "rule" if error["type"] in ("value_error", "assertion_error") else "wrong"


def _is_file(argument: str) -> bool:
    name, equals, _ = argument.partition("=")
    if argument.startswith("-") or (equals and "/" not in name):
        return False
    return argument.endswith((".yaml", ".yml")) or "/" in argument or Path(argument).is_file()


def _suggest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f"there is no directory {path.parent}"
    files = {file.stem: file.name for file in sorted(path.parent.iterdir()) if file.suffix in (".yaml", ".yml")}
    near, names = close_matches(path.stem, list(files)), list(files.values())
    return f"did you mean {path.parent / files[near[0]]}?" if near else f"its directory has {join_names(names) or 'no YAML file'}"
