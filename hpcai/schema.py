"""What a pydantic schema allows, in plain words: the options of a type hint, sections and unknown keys, completion by defaults, the
wording of expectations and advice, the nearest spellings, and the table of ``--help``."""

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
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pydantic
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from hpcai.programs import start

Key = tuple[str | int, ...]
Options = list[tuple[Any, tuple[Any, ...]]]  # the alternatives of a type hint, each with the rules that bound it
NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")  # as YAML 1.2 writes it


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


def lookup(options: Options, key: Key) -> Options:
    """What may stand at ``key``; nothing where there can be no such key."""
    for name in key:
        options = _below(options, name)
    return options


def _is(kind: Any, family: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, family)


def find_sections(options: Options, given: Mapping[str, Any] = types.MappingProxyType({})) -> list[type[pydantic.BaseModel]]:
    """The sections among ``options``, less those whose ``Literal`` keys (the tag of a union) contradict what was given."""
    sections = [base for base, _ in options if _is(base, pydantic.BaseModel)]

    def fits(section: type[pydantic.BaseModel]) -> bool:
        tags = {name: get_args(f.annotation) for name, f in section.model_fields.items() if get_origin(f.annotation) is Literal}
        return all(given[name] in choices for name, choices in tags.items() if name in given)

    return [section for section in sections if fits(section)] or sections


def unknown_keys(options: Options, given: Any, key: Key = ()) -> Iterator[Key]:
    """The keys of the plain tree ``given`` that no section knows."""
    if isinstance(given, list):
        for index, item in enumerate(given):
            yield from unknown_keys(_below(options, index), item, (*key, index))
    elif isinstance(given, dict):
        sections: Options = [(section, ()) for section in find_sections(options, given)]
        options = sections + [option for option in options if not _is(option[0], pydantic.BaseModel)]
        for name, value in given.items():
            below = _below(options, name)
            if below:
                yield from unknown_keys(below, value, (*key, name))
            elif sections:
                yield (*key, name)


def complete(options: Options, given: Any, by_word: AbstractSet[Key], usual: Any = PydanticUndefined, key: Key = ()) -> Any:
    """The plain tree ``given``, with ``usual`` (a section or a dict) and the classes' defaults for the keys that it leaves out.

    A dict extends its default only where its key is in ``by_word``; one from a file replaces it.
    Pydantic is never left to fill a default itself: in a strict reading of JSON it refuses a default that is a ``Path``.
    """
    if isinstance(given, list):
        return [complete(_below(options, i), item, by_word, key=(*key, i)) for i, item in enumerate(given)]
    if not isinstance(given, dict):
        return given
    sections = find_sections(options, given)
    section = next((s for s in sections if len(sections) == 1 or type(usual) is s), None)
    if section is None:
        base = usual if isinstance(usual, dict) and key in by_word else {}
        tree = to_jsonable_python(base, inf_nan_mode="constants")
        for name, value in given.items():
            tree[name] = complete(_below(options, name), value, by_word, base.get(name), (*key, name))
        return tree
    tree = dict(given)
    for name in section.model_fields:
        below = _below([(section, ())], name)
        inner = _default(section, name, usual)
        if name in given:
            tree[name] = complete(below, given[name], by_word, inner, (*key, name))
        elif inner is not PydanticUndefined:
            tree[name] = to_jsonable_python(inner, inf_nan_mode="constants")
        elif len(below) == 1 and find_sections(below):
            tree[name] = complete(below, {}, by_word, key=(*key, name))
    return tree


def _default(section: type[pydantic.BaseModel], name: str, usual: Any) -> Any:
    """The value of ``name`` where none is given: that of ``usual`` if it is such a section, otherwise the class's own default."""
    if isinstance(usual, section):
        return getattr(usual, name)
    field = section.model_fields[name]
    return PydanticUndefined if field.default_factory_takes_validated_data else field.get_default(call_default_factory=True)


def _rows(
    section: type[pydantic.BaseModel], usual: Any = None, key: Key = (), above: tuple[Any, ...] = ()
) -> Iterator[tuple[Key, Options, Any, str]]:
    """Every key with its options, default and description, a section before what is in it."""
    for name, field in section.model_fields.items():
        options = _options(field.annotation, tuple(field.metadata))
        default = _default(section, name, usual)
        yield (*key, name), options, default, " ".join((field.description or "").split())
        for inner in find_sections(options):
            if inner not in above:
                yield from _rows(inner, default, (*key, name), (*above, section))


# ---- In words -----------------------------------------------------------------------------------------------------------------

_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path", Any: "anything"}
_BOUNDS = {"gt": " > {}", "ge": " >= {}", "lt": " < {}", "le": " <= {}", "multiple_of": " a multiple of {}"}
_SIZES = {"min_length": ", at least {} long", "max_length": ", at most {} long", "pattern": ", matching {!r}"}


def describe(options: Options) -> str:
    """What is expected, in plain words."""
    choices = _choices(options)
    texts = [("one of " if len(choices) > 1 else "") + ", ".join(map(show_value, choices))] if choices else []
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
        return f"a section ({list_names(list(base.model_fields))})"
    if _is(kind, Mapping):
        return "a mapping" + (f" of names, each to {describe(_options(args[1]))}" if args else "")
    if _is(kind, tuple) and args and args[-1] is not ...:
        items = [describe(_options(arg)) for arg in args]
        return f"a list of {len(items)}" + (f", each {items[0]}" if len(set(items)) == 1 else f": {', '.join(items)}")
    if _is(kind, Sequence | AbstractSet) and not _is(kind, str):
        return "a list" + (f", each {describe(_options(args[0]))}" if args else "")
    return _NAMES.get(base) or str(getattr(base, "__name__", base))


def _choices(options: Options) -> list[Any]:
    found: list[Any] = []
    for base, _ in options:
        found += get_args(base) if get_origin(base) is Literal else [m.value for m in base] if _is(base, enum.Enum) else []
    return found


def show_value(value: Any) -> str:
    """A value as one would write it, cut to a readable length."""
    value = to_jsonable_python(value, inf_nan_mode="constants", fallback=str)
    if isinstance(value, list):
        text = f"[{', '.join(map(show_value, value))}]"
    elif isinstance(value, dict):
        text = "{" + ", ".join(f"{name}: {show_value(item)}" for name, item in value.items()) + "}"
    else:
        text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def dotted_name(key: Key) -> str:
    """A key as one would write it: ``chain[1].path``."""
    return "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in key).lstrip(".") or "the settings"


def list_names(names: list[str]) -> str:
    """The first dozen of ``names``, in one line."""
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")


def complaint(key: Key, value: Any, options: Options) -> str:
    """What was found at ``key``, what was expected and what to do."""
    advice = _advice(value, options)
    return f"{dotted_name(key)} is {show_value(value)}, expected {describe(options)}" + (f"; {advice}" if advice else "")


def _advice(value: Any, options: Options) -> str:
    bases = [base for base, _ in options]
    if isinstance(value, str):
        number = value.replace("_", "")
        if NUMBER.fullmatch(number) and (float in bases or (int in bases and number.isdigit())):
            return f"write {number}, without quotes"
        if bool in bases and value.lower() in ("yes", "on", "y", "no", "off", "n"):
            return f"write {show_value(value.lower() in ('yes', 'on', 'y'))}"
        if type(None) in bases and value.lower() == "none":
            return "write null"
        near = nearest_words(value, [str(choice) for choice in _choices(options)])
        return f"did you mean {near[0]!r}?" if near else ""
    if isinstance(value, float) and value.is_integer() and int in bases:
        return f"write {int(value)}"
    if isinstance(value, int | float) and (str in bases or Path in bases or str(value) in _choices(options)):
        return f"text is put in quotes: '\"{show_value(value)}\"'"
    return ""


def nearest_words(word: str, names: Sequence[str]) -> list[str]:
    """The names, two at most, that ``word`` may be a misspelling of, the likelier first."""
    plain = {name.lower().replace("-", "_"): name for name in names}
    return [plain[near] for near in difflib.get_close_matches(word.lower().replace("-", "_"), plain, n=2)]


def nearest_keys(schema: type[pydantic.BaseModel], key: Key, names: list[str]) -> list[Key]:
    """What was probably meant: keys of the same name elsewhere, otherwise one of a like name here, otherwise one anywhere."""
    known = list(dict.fromkeys(known for known, *_ in _rows(schema)))
    if key in known:  # it belongs to the other section of a union
        return []
    last = str(key[-1])
    same = [other for other in known if other[-1] == last]
    here = [(*key[:-1], name) for name in nearest_words(last, names)]
    alike = [other for name in nearest_words(last, [str(other[-1]) for other in known]) for other in known if other[-1] == name]
    return same[:3] or here[:1] or alike[:1]


# ---- Help ---------------------------------------------------------------------------------------------------------------------

_USAGE = """usage: {} [file.yaml] [key=value ...] [--show] [--help]
{}
  --show  print the settings of this run as YAML, which can be run again
  --help  this page

Defaults give way to the file, the file to the words. Values are written as in YAML: step.lr=2e-3 shape=[1,2] name=null
"""


def write_help(schema: type[pydantic.BaseModel]) -> None:
    """Every key with its type, default and description, by section."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = start(spec.name.removesuffix(".__main__")) if spec else f"python {Path(sys.argv[0]).name}"
    about = textwrap.dedent(schema.__dict__.get("__doc__") or "").strip()
    sys.stdout.write(_USAGE.format(program, f"\n{about}\n" if about else ""))
    groups: dict[Key, list[tuple[str, ...]]] = {(): []}
    heads: dict[Key, str] = {(): "top level"}
    for key, options, default, about in _rows(schema):
        sections = find_sections(options)
        if sections:
            about = about or (sections[0].__dict__.get("__doc__") or "").strip().partition("\n")[0]
            heads[key] = dotted_name(key) + (" (null unless given)" if default is None else "") + (f": {about}" if about else "")
            groups[key] = []
        if any(base not in (*sections, type(None)) for base, _ in options):
            shown = "required" if default is PydanticUndefined else show_value(default)
            groups[key[:-1]].append((dotted_name(key), describe(options), shown, about))
    _table({heads[key]: lines for key, lines in groups.items() if lines})


def _table(groups: Mapping[str, Sequence[tuple[str, ...]]]) -> None:
    """A table as wide as the terminal, coloured by rich there and plain text elsewhere."""
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
