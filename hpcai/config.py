"""The settings of a run: defaults < one YAML file < ``key=value`` words, into one frozen, validated object.

    class Step(Settings):
        lr: float = Field(1e-3, gt=0)
        "Learning rate after the warm-up."

    class Config(Settings):
        step: Step = Step()

    run(Config, main)                    # python -m apps.x [small.yaml] [step.lr=2e-3 ...] [--show] [--help]

Files and words are YAML 1.2 (core schema), so only ``true`` and ``false`` are booleans: ``no`` and ``on`` stay text. ``1e-3`` is a
number and ``010`` is ten; ``1_000``, ``1:30`` and dates are text. A word replaces only its key, and a mapping stands for its keys:
``step={lr: 1}`` means ``step.lr=1``. A list is replaced whole, and so is the default of a ``dict`` by a file. Of two words for the
same key the later counts. Every mistake is in the one answer, file first.
"""

import difflib
import enum
import json
import re
import shutil
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin

import pydantic
import yaml
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from hpcai.errors import ConfigError, HpcaiError, LaunchError, MeshError

T = TypeVar("T", bound=pydantic.BaseModel)
Key = tuple[str | int, ...]
Options = list[tuple[Any, tuple[Any, ...]]]  # the alternatives of a type hint, each with the rules that bound it


class Settings(pydantic.BaseModel):
    """The base of every settings class: frozen, no unknown keys, no silent conversion (``true`` and ``"3"`` are not numbers).

    The text below a field describes it in ``--help``. A section without a default stands for its class's own defaults. Built in
    Python, a field takes exactly its type: a tuple, a ``Path``.
    """

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, use_attribute_docstrings=True, ser_json_inf_nan="constants"
    )


def load(schema: type[T], path: str | Path | None = None, words: Sequence[str] = ()) -> T:
    """``schema`` from its defaults, then the YAML file ``path``, then ``key=value`` words.

    ConfigError lists all mistakes, one per line: where it was written, the dotted key, what was found and what was expected.
    """
    given = _Given(schema, path)
    if path is not None:
        given.read(Path(path))
    for number, word in enumerate(words):
        given.word(number, word)
    return cast(T, given.validate())


def dump(settings: pydantic.BaseModel) -> str:
    """YAML of every key, defaults included, that ``load`` reads back as an equal object."""
    tree = to_jsonable_python(settings, inf_nan_mode="constants")
    return str(yaml.dump(tree, Dumper=_Writer, sort_keys=False, allow_unicode=True, width=120))


def run(schema: type[T], main: Callable[[T], None], argv: Sequence[str] | None = None) -> None:
    """Call ``main`` with the settings of the command line: ``[file.yaml] [key=value ...] [--show] [--help]``.

    Exit codes: 2 for settings, a mesh or a launch that is refused, 1 for any other error of ours, 130 for Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if "--help" in words or "-h" in words:
        return _help(schema)
    show = "--show" in words
    words = [word for word in words if word != "--show"]
    files = [word for word in words if _is_file(word)]
    if files:
        words.remove(files[0])
    try:
        try:
            settings = load(schema, files[0] if files else None, words)
        except ConfigError as problem:
            lines = str(problem).splitlines()
            count = "1 mistake" if len(lines) == 1 else f"{len(lines)} mistakes"
            sys.stderr.write("\n  ".join([f"{count} in the settings (--help lists every key):", *lines]) + "\n")
            raise SystemExit(2) from None
        if show:
            sys.stdout.write(dump(settings))
        else:
            main(settings)
    except HpcaiError as problem:
        sys.stderr.write(f"error: {problem}\n")
        raise SystemExit(2 if isinstance(problem, ConfigError | MeshError | LaunchError) else 1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    return None


# ---- YAML ---------------------------------------------------------------------------------------------------------------------

_TAG = "tag:yaml.org,2002:"
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SCALARS = [  # YAML 1.2, section 10.3.2
    ("null", re.compile(r"(null|Null|NULL|~|)$"), "nN~\0"),
    ("bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    ("int", re.compile(r"([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), "-+0123456789"),
    ("float", re.compile(_NUMBER.pattern + r"$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"), "-+.0123456789"),
]


class _Reader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}


class _Writer(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or YAML 1.2 would read as something else, so that any reader gets what was meant."""


for _kind, _pattern, _first in _SCALARS:
    _Reader.add_implicit_resolver(_TAG + _kind, _pattern, ["" if c == "\0" else c for c in _first])
    _Writer.add_implicit_resolver(_TAG + _kind, _pattern, ["" if c == "\0" else c for c in _first])
_Writer.add_representer(  # the emitter would fold a line separator of Unicode into a space
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
        text.encode()  # an escaped half of a character pair is a ValueError
        return text
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if kind == "float" and not text.lower().endswith("nan"):
        return float(text.replace(".inf", "inf").replace(".Inf", "inf").replace(".INF", "inf"))
    raise ValueError(f"{text} is of no use as a setting" if kind == "float" else f"the tag {node.tag} is not known here")


# ---- What was given, and where ------------------------------------------------------------------------------------------------


class _Origin(NamedTuple):
    """Sorts the file before the words, and each by its line or place."""

    rank: int
    line: int
    text: str


class _Given:
    """The tree of all that was given, where each key of it was written, and what is wrong with it."""

    def __init__(self, schema: type[pydantic.BaseModel], path: str | Path | None) -> None:
        self.schema, self.path = schema, path
        self.root: Options = [(schema, ())]
        self.tree: dict[str, Any] = {}
        self.origins: dict[Key, _Origin] = {(): _Origin(0, 0, str(path)) if path is not None else _Origin(1, -1, "command line")}
        self.problems: list[tuple[_Origin, str]] = []
        self.refused: set[Key] = set()  # complained of already: whatever stands there counts for nothing
        self.readable = True

    def read(self, path: Path) -> None:
        """The file; one that cannot be read is a mistake like any other, so that the words are still checked."""
        place, why = self.origins[()], ""
        origins: dict[Key, _Origin] = {}
        try:
            node = yaml.compose(path.read_text(encoding="utf-8"), Loader=_Reader)
            tree = {} if node is None else self.plain(node, (), origins, self.line)
            if isinstance(tree, dict):
                self.merge(tree, origins, self.tree)
                return
            why = f"found {_show(tree)}, expected key: value lines"
        except FileNotFoundError:
            why = f"no such file; {_near_file(path)}"
        except OSError as problem:
            why = f"cannot be read: {problem.strerror}"
        except yaml.MarkedYAMLError as problem:
            if mark := problem.problem_mark:
                place = self.line(problem)._replace(text=f"{self.path}:{mark.line + 1}:{mark.column + 1}")
            why = f"not YAML: {problem.problem}" + ("; indent with spaces, not tabs" if "'\\t'" in str(problem.problem) else "")
        except RecursionError:
            why = "nested too deeply, or an alias that contains itself"
        except (UnicodeDecodeError, yaml.YAMLError) as problem:
            why = f"not YAML: {' '.join(str(problem).split())}"
        self.readable = False
        self.problems.append((place, why))

    def line(self, where: yaml.Node | yaml.MarkedYAMLError) -> _Origin:
        mark = where.start_mark if isinstance(where, yaml.Node) else where.problem_mark
        line = cast(yaml.Mark, mark).line + 1
        return _Origin(0, line, f"{self.path}:{line}")

    def word(self, number: int, word: str) -> None:
        name, equals, text = word.partition("=")
        origin, why = _Origin(1, number, "command line"), ""
        if word.startswith("-") and equals:
            why = f"{word}: settings are written without dashes: {word.lstrip('-')}"
        elif word.startswith("-"):
            why = f"{word}: no such option; the options are --show and --help, settings are written key=value"
        elif _is_file(word):
            why = f"{word}: a second file; one run has one file" + (f", here {self.path}" if self.path else "")
        elif not equals or not re.fullmatch(r"[^\s.]+(\.[^\s.]+)*", name):
            why = f"{word}: expected key=value, such as step.lr=1e-3, or one file.yaml"
        else:
            why = self.assign(name, text, origin)
        if why:
            self.problems.append((origin, why))

    def assign(self, name: str, text: str, origin: _Origin) -> str:
        """Put ``text``, read as YAML, at the dotted ``name``; the answer is what is wrong with it, or nothing."""
        key: Key = tuple(name.split("."))
        origins = {key[:length]: origin for length in range(1, len(key) + 1)}
        tree: Any = None
        why = ""
        try:
            node = yaml.compose(text, Loader=_Reader)
            if node is None:
                why = f"{name}={text} has no value; write {name}=null for none, or '{name}=\"\"' for empty text"
            else:
                tree = self.plain(node, key, origins, lambda node: origin)
        except (yaml.YAMLError, RecursionError) as problem:
            reason = getattr(problem, "problem", None) or " ".join(str(problem).split())
            why = f"{name}={text} is not YAML ({reason}); text is put in quotes: '{name}=\"{text}\"'"
        if why:
            self.refused.add(key)
        for part in reversed(key):
            tree = {part: tree}
        self.merge(tree, origins, self.tree)
        return why

    def plain(self, node: yaml.Node, key: Key, origins: dict[Key, _Origin], at: Callable[[yaml.Node], _Origin]) -> Any:
        """The value of a YAML node; ``at`` says where a node was written."""
        if isinstance(node, yaml.ScalarNode):
            options = _at(self.root, key)
            if node.value == "" and node.style is None and options and len(_sections(options)) == len(options):
                return {}  # a section whose every line is commented out
            try:
                return _scalar(node)
            except ValueError as problem:
                self.problems.append((at(node), f"{_dotted(key)}: {problem}; write a plain value"))
                self.refused.add(key)
                return None
        if isinstance(node, yaml.SequenceNode):
            items = []
            for index, child in enumerate(node.value):
                origins[(*key, index)] = at(child)
                items.append(self.plain(child, (*key, index), origins, at))
            return items
        tree: dict[str, Any] = {}
        for name, child in node.value:
            below = (*key, str(name.value))
            if not isinstance(name, yaml.ScalarNode):
                self.problems.append((at(name), f"{_dotted(key)}: a key must be a plain name"))
            elif name.value in tree:
                first = origins[below]
                twice = f"written twice, first in {first.text}" if first.rank == 0 else "written twice"
                self.problems.append((at(name), f"{_dotted(below)} is {twice}; keep one"))
            else:
                origins[below] = at(name)
                tree[name.value] = self.plain(child, below, origins, at)
        return tree

    def merge(self, tree: dict[str, Any], origins: dict[Key, _Origin], into: dict[str, Any], key: Key = ()) -> None:
        for name, value in tree.items():
            at, old = (*key, name), into.get(name)
            if isinstance(value, dict) and isinstance(old, dict):
                self.merge(value, origins, old, at)
                continue
            if isinstance(value, dict) and old is not None and _sections(_at(self.root, at)):
                self.problems.append((self.origins[at], _wrong(at, old, _at(self.root, at))))
            into[name] = value
            self.origins |= {k: o for k, o in origins.items() if k[: len(at)] == at}

    def origin(self, key: Key) -> _Origin:
        while key not in self.origins:
            key = key[:-1]
        return self.origins[key]

    def validate(self) -> pydantic.BaseModel:
        meant: set[Key] = set()
        tree = _complete(self.root, self.tree, self.origins)
        for key in list(_unknown(self.root, tree)):
            parent: Any = tree
            for name in key[:-1]:
                parent = parent[name]
            sections = _sections(_at(self.root, key[:-1]), parent)
            names = [name for section in sections for name in section.model_fields]
            near = _nearest(self.schema, key, names)
            meant |= set(near)
            hint = f"did you mean {' or '.join(map(_dotted, near))}?" if near else f"the keys here are {_listed(names)}"
            self.problems.append((self.origin(key), f"{_dotted(key)}: no such key; {hint}"))
            del parent[key[-1]]
        try:
            settings = self.schema.model_validate_json(json.dumps(tree), strict=True)
        except pydantic.ValidationError as problem:
            self.explain(problem.errors(include_url=False), tree, meant)
        if self.problems:
            raise ConfigError("\n".join(f"{origin.text}: {text}" for origin, text in sorted(self.problems, key=lambda p: p[0][:2])))
        return settings

    def explain(self, errors: Sequence[Any], tree: Any, meant: set[Key]) -> None:
        """Pydantic's errors in our words: one for each key, and of a key and what is below it only what is below."""
        found: dict[tuple[Key, str], Any] = {}
        for error in errors:
            found.setdefault(_key(error, tree, self.root), error)
        keys = {key for key, _ in found}
        for (key, kind), error in found.items():
            origin, options = self.origin(key), _at(self.root, key)
            if key in self.refused or (kind in ("rule", "missing") and not self.readable):
                continue  # complained of already, or the unreadable file may have the answer
            if kind == "rule":
                words = [o for k, o in self.origins.items() if k[: len(key)] == key and k and o.rank == 1]
                if origin.rank == 0 and words:
                    origin = origin._replace(text=f"{origin.text}, command line")
                sentence = " ".join(str(error["ctx"]["error"]).split())
                self.problems.append((origin, f"{_dotted(key)}: {sentence}" if key else sentence))
            elif kind == "missing" and key not in meant:
                self.problems.append((origin, f"{_dotted(key)} is missing, expected {_say(options)}"))
            elif kind == "wrong" and not any(other[: len(key)] == key and other != key for other in keys):
                wrong = _wrong(key, _value(tree, key), options)
                default = _Origin(-1, 0, self.schema.__name__), f"the default of {wrong}"
                self.problems.append((origin, wrong) if key in self.origins else default)
        if not self.problems:
            self.problems = [(self.origins[()], f"{_dotted(_key(e, tree, self.root)[0])}: {e['msg']}") for e in errors]


def _value(tree: Any, key: Key) -> Any:
    for name in key:
        tree = tree[name]
    return tree


def _key(error: Any, tree: Any, options: Options) -> tuple[Key, str]:
    """The key that a pydantic error is about (its ``loc`` also names branches of unions), and the kind of mistake.

    ``branch``: the mistake is in a section of a union that was not meant.
    """
    key: Key = ()
    kind, loc = error["type"], error["loc"]
    for name in loc:
        if name in (tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()):
            key, tree, options = (*key, name), tree[name], _below(options, name)
        elif isinstance(tree, dict):
            sections, words = _sections(options), re.split(r"\W+", str(name))
            if any(s.__name__ in words for s in sections if s not in _sections(options, tree)):
                return key, "branch"
    if kind.startswith("union_tag_"):
        return (*key, error["ctx"]["discriminator"].strip("'")), "missing" if kind == "union_tag_not_found" else "wrong"
    if kind == "missing" and not isinstance(tree, list):
        return (*key, loc[-1]), "missing"
    return key, {"value_error": "rule", "assertion_error": "rule", "extra_forbidden": "branch"}.get(kind, "wrong")


# ---- What a schema expects ----------------------------------------------------------------------------------------------------


def _options(hint: Any, rules: tuple[Any, ...] = ()) -> Options:
    if get_origin(hint) is Annotated:
        hint, *extra = get_args(hint)
        return _options(hint, rules + tuple(r for e in extra for r in (e.metadata if isinstance(e, FieldInfo) else [e])))
    if get_origin(hint) in (Union, types.UnionType):
        return [option for branch in get_args(hint) for option in _options(branch, rules)]
    return [(hint, rules)]


def _below(options: Options, name: str | int) -> Options:
    """What may stand under ``name``; nothing where there can be no such key."""
    found: Options = []
    for base, _ in options:
        kind, args = get_origin(base) or base, get_args(base)
        if _is(base, pydantic.BaseModel) and name in base.model_fields:
            field = base.model_fields[name]
            found += _options(field.annotation, tuple(field.metadata))
        elif _is(kind, Mapping):
            found += _options(args[1] if args else Any)
        elif isinstance(name, int) and _is(kind, tuple) and args and args[-1] is not ...:
            found += _options(args[name]) if name < len(args) else []
        elif isinstance(name, int) and _is(kind, Sequence | AbstractSet) and not _is(kind, str):
            found += _options(args[0] if args else Any)
    return found


def _at(options: Options, key: Key) -> Options:
    for name in key:
        options = _below(options, name)
    return options


def _is(kind: Any, family: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, family)


def _sections(options: Options, given: Mapping[str, Any] = types.MappingProxyType({})) -> list[type[pydantic.BaseModel]]:
    """The sections among ``options``, less those whose ``Literal`` keys (the tag of a union) contradict what was given."""
    sections = [base for base, _ in options if _is(base, pydantic.BaseModel)]
    if len(sections) < 2:
        return sections

    def fits(section: type[pydantic.BaseModel]) -> bool:
        tags = {name: get_args(f.annotation) for name, f in section.model_fields.items() if get_origin(f.annotation) is Literal}
        return all(given[name] in choices for name, choices in tags.items() if name in given)

    return [section for section in sections if fits(section)] or sections


def _unknown(options: Options, given: Any, key: Key = ()) -> Iterator[Key]:
    if isinstance(given, list):
        for index, item in enumerate(given):
            yield from _unknown(_below(options, index), item, (*key, index))
    elif isinstance(given, dict):
        sections: Options = [(section, ()) for section in _sections(options, given)]
        options = sections + [option for option in options if not _is(option[0], pydantic.BaseModel)]
        for name, value in given.items():
            below = _below(options, name)
            if below:
                yield from _unknown(below, value, (*key, name))
            elif sections:
                yield (*key, name)


def _complete(options: Options, given: Any, origins: Mapping[Key, _Origin], usual: Any = PydanticUndefined, key: Key = ()) -> Any:
    """The plain tree ``given``, with ``usual`` (a section or a dict) and the classes' defaults for the keys that it leaves out.

    Pydantic is never left to fill a default itself: in a strict reading of JSON it refuses a default that is a ``Path``.
    """
    if isinstance(given, list):
        return [_complete(_below(options, i), item, origins, key=(*key, i)) for i, item in enumerate(given)]
    if not isinstance(given, dict):
        return given
    sections = _sections(options, given)
    section = next((s for s in sections if len(sections) == 1 or type(usual) is s), None)
    if section is None:
        base = usual if isinstance(usual, dict) and origins[key].rank == 1 else {}
        tree = to_jsonable_python(base, inf_nan_mode="constants")
        for name, value in given.items():
            tree[name] = _complete(_below(options, name), value, origins, base.get(name), (*key, name))
        return tree
    tree = dict(given)
    for name, field in section.model_fields.items():
        below = _below([(section, ())], name)
        inner = getattr(usual, name) if isinstance(usual, section) else _default(field)
        if name in given:
            tree[name] = _complete(below, given[name], origins, inner, (*key, name))
        elif inner is not PydanticUndefined:
            tree[name] = to_jsonable_python(inner, inf_nan_mode="constants")
        elif len(below) == 1 and _sections(below):
            tree[name] = _complete(below, {}, origins, key=(*key, name))
    return tree


def _default(field: FieldInfo) -> Any:
    return PydanticUndefined if field.default_factory_takes_validated_data else field.get_default(call_default_factory=True)


def _rows(
    section: type[pydantic.BaseModel], usual: Any = None, key: Key = (), above: tuple[Any, ...] = ()
) -> Iterator[tuple[Key, Options, Any, str]]:
    """Every key with its options, default and description, a section before what is in it."""
    for name, field in section.model_fields.items():
        options = _options(field.annotation, tuple(field.metadata))
        default = getattr(usual, name) if isinstance(usual, section) else _default(field)
        yield (*key, name), options, default, " ".join((field.description or "").split())
        for inner in _sections(options):
            if inner not in above:
                yield from _rows(inner, default, (*key, name), (*above, section))


# ---- In words -----------------------------------------------------------------------------------------------------------------

_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path", Any: "anything"}
_BOUNDS = {"gt": " > {}", "ge": " >= {}", "lt": " < {}", "le": " <= {}", "multiple_of": " a multiple of {}"}
_SIZES = {"min_length": ", at least {} long", "max_length": ", at most {} long", "pattern": ", matching {!r}"}


def _say(options: Options) -> str:
    """What is expected, in plain words."""
    choices = _choices(options)
    texts = [("one of " if len(choices) > 1 else "") + ", ".join(map(_show, choices))] if choices else []
    for base, rules in options:
        if base is type(None):
            texts.append("null")
        elif get_origin(base) is not Literal and not _is(base, enum.Enum):
            texts.append(_say_one(base) + " and".join(_say_rules(rules, _BOUNDS)) + "".join(_say_rules(rules, _SIZES)))
    return " or ".join(dict.fromkeys(texts))


def _say_rules(rules: tuple[Any, ...], table: dict[str, str]) -> list[str]:
    values = [(text, getattr(rule, name, None)) for name, text in table.items() for rule in rules]
    return [text.format(value) for text, value in values if value is not None]


def _say_one(base: Any) -> str:
    kind, args = get_origin(base) or base, get_args(base)
    if _is(base, pydantic.BaseModel):
        return f"a section ({_listed(list(base.model_fields))})"
    if _is(kind, Mapping):
        return "a mapping" + (f" of names, each to {_say(_options(args[1]))}" if args else "")
    if _is(kind, tuple) and args and args[-1] is not ...:
        items = [_say(_options(arg)) for arg in args]
        return f"a list of {len(items)}" + (f", each {items[0]}" if len(set(items)) == 1 else f": {', '.join(items)}")
    if _is(kind, Sequence | AbstractSet) and not _is(kind, str):
        return "a list" + (f", each {_say(_options(args[0]))}" if args else "")
    return _NAMES.get(base) or str(getattr(base, "__name__", base))


def _choices(options: Options) -> list[Any]:
    found: list[Any] = []
    for base, _ in options:
        found += get_args(base) if get_origin(base) is Literal else [m.value for m in base] if _is(base, enum.Enum) else []
    return found


def _show(value: Any) -> str:
    """A value as one would write it, cut to a readable length."""
    value = to_jsonable_python(value, inf_nan_mode="constants", fallback=str)
    if isinstance(value, list):
        text = f"[{', '.join(map(_show, value))}]"
    elif isinstance(value, dict):
        text = "{" + ", ".join(f"{name}: {_show(item)}" for name, item in value.items()) + "}"
    else:
        text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _dotted(key: Key) -> str:
    return "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in key).lstrip(".") or "the settings"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")


def _wrong(key: Key, value: Any, options: Options) -> str:
    advice = _advice(value, options)
    return f"{_dotted(key)} is {_show(value)}, expected {_say(options)}" + (f"; {advice}" if advice else "")


def _advice(value: Any, options: Options) -> str:
    bases = [base for base, _ in options]
    if isinstance(value, str):
        number = value.replace("_", "")
        if _NUMBER.fullmatch(number) and (float in bases or (int in bases and number.isdigit())):
            return f"write {number}, without quotes"
        if bool in bases and value.lower() in ("yes", "on", "y", "no", "off", "n"):
            return f"write {_show(value.lower() in ('yes', 'on', 'y'))}"
        if type(None) in bases and value.lower() == "none":
            return "write null"
        near = _close(value, [str(choice) for choice in _choices(options)])
        return f"did you mean {near[0]!r}?" if near else ""
    if isinstance(value, float) and value.is_integer() and int in bases:
        return f"write {int(value)}"
    if isinstance(value, int | float) and (str in bases or Path in bases or str(value) in _choices(options)):
        return f"text is put in quotes: '\"{_show(value)}\"'"
    return ""


def _close(word: str, names: Sequence[str]) -> list[str]:
    plain = {name.lower().replace("-", "_"): name for name in names}
    return [plain[near] for near in difflib.get_close_matches(word.lower().replace("-", "_"), plain, n=2)]


def _nearest(schema: type[pydantic.BaseModel], key: Key, names: list[str]) -> list[Key]:
    """What was probably meant: a key of the same name elsewhere, else of a like name here, else of a like name anywhere."""
    known = list(dict.fromkeys(known for known, *_ in _rows(schema)))
    if key in known:  # of the other section of a union
        return []
    last = str(key[-1])
    same = [other for other in known if other[-1] == last]
    here = [(*key[:-1], name) for name in _close(last, names)]
    alike = [other for name in _close(last, [str(other[-1]) for other in known]) for other in known if other[-1] == name]
    return same[:3] or here[:1] or alike[:1]


def _is_file(word: str) -> bool:
    name, equals, _ = word.partition("=")
    if word.startswith("-") or (equals and "/" not in name):
        return False
    return word.endswith((".yaml", ".yml")) or "/" in word or Path(word).is_file()


def _near_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f"there is no directory {path.parent}"
    files = {file.stem: file.name for file in sorted(path.parent.iterdir()) if file.suffix in (".yaml", ".yml")}
    near, names = _close(path.stem, list(files)), list(files.values())
    return f"did you mean {path.parent / files[near[0]]}?" if near else f"its directory has {_listed(names) or 'no YAML file'}"


# ---- Help ---------------------------------------------------------------------------------------------------------------------

_USAGE = """usage: {} [file.yaml] [key=value ...] [--show] [--help]
{}
  --show  print the settings of this run as YAML, which can be run again
  --help  this page

Defaults give way to the file, the file to the words. Values are written as in YAML: step.lr=2e-3 shape=[1,2] name=null
"""


def _help(schema: type[pydantic.BaseModel]) -> None:
    """Every key with its type, default and description, by section."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"python -m {spec.name.removesuffix('.__main__')}" if spec else f"python {Path(sys.argv[0]).name}"
    about = textwrap.dedent(schema.__dict__.get("__doc__") or "").strip()
    sys.stdout.write(_USAGE.format(program, f"\n{about}\n" if about else ""))
    groups: dict[Key, list[tuple[str, ...]]] = {(): []}
    heads: dict[Key, str] = {(): "top level"}
    for key, options, default, about in _rows(schema):
        sections = _sections(options)
        if sections:
            about = about or (sections[0].__dict__.get("__doc__") or "").strip().partition("\n")[0]
            heads[key] = _dotted(key) + (" (null unless given)" if default is None else "") + (f": {about}" if about else "")
            groups[key] = []
        if any(base is not type(None) for base, _ in options if base not in sections):
            shown = "required" if default is PydanticUndefined else _show(default)
            groups[key[:-1]].append((_dotted(key), _say(options), shown, about))
    _table({heads[key]: lines for key, lines in groups.items() if lines})


def _table(groups: Mapping[str, Sequence[tuple[str, ...]]]) -> None:
    """As wide as the terminal; coloured by rich on one, plain text elsewhere."""
    lines = [line for group in groups.values() for line in group]
    widths = [min(limit, max(len(line[column]) for line in lines)) for column, limit in enumerate((36, 30, 20))] if lines else []
    widths.append(max(24, shutil.get_terminal_size((100, 24)).columns - sum(widths) - 9))
    draw = _colour() if sys.stdout.isatty() else lambda parts: sys.stdout.write("".join(parts).rstrip() + "\n")
    for head, group in groups.items():
        draw(["\n" + head])
        for line in group:
            cells = [textwrap.wrap(cell, width) for cell, width in zip(line, widths)]
            for parts in zip_longest(*cells, fillvalue=""):
                draw(["  " + part.ljust(width) for part, width in zip(parts, widths)])


def _colour() -> Callable[[list[str]], object]:
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True)
    styles = ("bold", "cyan", "green", "")
    return lambda parts: console.print(Text.assemble(*zip(parts, styles)))
