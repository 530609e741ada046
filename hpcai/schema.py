"""The JSON schema of a settings class: keys, defaults, descriptions of accepted values, and ``--help``.

A field of a section is a section, an optional section or a value. Lists and mappings contain no sections.
"""

import difflib
import json
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pydantic

from hpcai.programs import command_of

Key = tuple[str | int, ...]
Node = Mapping[str, Any]  # a part of a JSON schema
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # control characters, and separators of lines
NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")  # as YAML 1.2 writes it

_MISSING: Any = object()
_TYPES = {"integer": "a whole number", "number": "a number", "string": "text", "boolean": "true or false", "path": "a path",
          "date": "a date"}  # fmt: skip
_BOUNDS = {"exclusiveMinimum": " > {}", "minimum": " >= {}", "exclusiveMaximum": " < {}", "maximum": " <= {}",
           "multipleOf": " a multiple of {}"}  # fmt: skip


def _to_int(bound: float) -> float:
    """Return an integral ``bound`` as int: pydantic before 2.11 writes 0.0, later versions write 0."""
    return int(bound) if bound == int(bound) else bound


class Schema:
    """The JSON schema of a settings class."""

    def __init__(self, kind: type[pydantic.BaseModel]) -> None:
        self.root: Node = kind.model_json_schema()

    def alternatives(self, node: Node) -> list[Node]:
        """Return the alternatives of ``node``, with references resolved."""
        if "$ref" in node:
            return [self.root["$defs"][node["$ref"].rpartition("/")[2]]]
        return [option for branch in node["anyOf"] for option in self.alternatives(branch)] if "anyOf" in node else [node]

    def section(self, node: Node) -> Node | None:
        """Return the section among the alternatives of ``node``, or None."""
        return next((option for option in self.alternatives(node) if "properties" in option), None)

    def at(self, key: Key) -> list[Node]:
        """Return the alternatives at ``key``, none if there is no such key."""
        options = [self.root]
        for name in key:
            options = [inner for option in options for inner in self._below(option, name)]
        return options

    def _below(self, option: Node, name: str | int) -> list[Node]:
        if isinstance(name, int):
            each = option.get("prefixItems", ())
            inner = each[name] if name < len(each) else option.get("items")
        else:
            inner = option.get("properties", {}).get(name) or option.get("additionalProperties")
        return self.alternatives(inner) if isinstance(inner, dict) else []

    def unknown_keys(self, values: Mapping[str, Any], key: Key = ()) -> Iterator[Key]:
        """Yield the keys of the tree ``values`` that the schema does not have."""
        for name, value in values.items():
            options = self.at((*key, name))
            if not options:
                yield (*key, name)
            elif isinstance(value, dict) and any("properties" in option for option in options):
                yield from self.unknown_keys(value, (*key, name))

    def apply_renames(self, values: dict[str, Any], key: Key = ()) -> Iterator[tuple[Key, Key]]:
        """Move the values of earlier names of settings (``Settings.renamed``) to today's, in place. Yield each earlier key and
        today's."""
        renamed = {name: new for option in self.at(key) for name, new in option.get("renamed", {}).items() if new not in values}
        for name, value in list(values.items()):
            if name in renamed:
                values[renamed[name]] = values.pop(name)
                yield (*key, name), (*key, renamed[name])
            elif isinstance(value, dict):
                yield from self.apply_renames(value, (*key, name))

    def fill_defaults(self, values: Any, node: Node | None = None, section_default: Any = _MISSING) -> Any:
        """Return the tree ``values``, with missing keys from ``section_default`` and the defaults of classes.

        Pydantic does not apply the default of a section to its keys, and in strict JSON mode rejects a default that is a ``Path``.
        """
        section = self.section(self.root if node is None else node)
        if section is None or not isinstance(values, dict):
            return values
        tree = {}
        for name, field in section["properties"].items():
            default = section_default.get(name, _MISSING) if isinstance(section_default, dict) else field.get("default", _MISSING)
            if name in values:
                tree[name] = self.fill_defaults(values[name], field, default)
            elif default is not _MISSING:
                tree[name] = default
            elif self.section(field):
                tree[name] = self.fill_defaults({}, field)
        return tree

    def suggest(self, key: Key) -> list[Key]:
        """Return suggestions: keys of the same name, otherwise one of a similar name in its section, otherwise in any."""
        known = [known for known, *_ in self._rows(self.root)]
        last, names = str(key[-1]), [str(other[-1]) for other in known]
        same = [other for other in known if other[-1] == last]
        nearby = [(*key[:-1], name) for name in close_matches(last, [str(o[-1]) for o in known if o[:-1] == key[:-1]])]
        similar = [other for name in close_matches(last, names) for other in known if other[-1] == name]
        return same[:3] or nearby[:1] or similar[:1]

    def _rows(self, section: Node, section_default: Any = _MISSING, key: Key = ()) -> Iterator[tuple[Key, Node, Any]]:
        """Yield every key with its field and default, a section before its keys."""
        for name, field in section["properties"].items():
            default = section_default.get(name, _MISSING) if isinstance(section_default, dict) else field.get("default", _MISSING)
            yield (*key, name), field, default
            if inner := self.section(field):
                yield from self._rows(inner, default, (*key, name))

    # ---- Descriptions

    def describe(self, options: Sequence[Node]) -> str:
        """Return a description of the accepted values."""
        choices = _choices(options)
        texts = [("one of " if len(choices) > 1 else "") + ", ".join(map(format_value, choices))] if choices else []
        return " or ".join(dict.fromkeys([*texts, *(self._describe_one(option) for option in options if not _choices([option]))]))

    def _describe_one(self, option: Node) -> str:
        kind = option.get("type")
        if "properties" in option:
            return f"a section ({join_names(list(option['properties']))})"
        if kind == "object":
            return f"a mapping of names, each to {self.describe(self._below(option, 'any'))}"
        if kind == "array":
            items = [self.describe(self.alternatives(item)) for item in option.get("prefixItems", ())]
            if items:
                return f"a list of {len(items)}" + (f", each {items[0]}" if len({*items}) == 1 else f": {', '.join(items)}")
            least = f", at least {option['minItems']} long" if "minItems" in option else ""
            return f"a list, each {self.describe(self._below(option, 0))}{least}"
        bounds = [text.format(_to_int(option[name])) for name, text in _BOUNDS.items() if name in option]
        return _TYPES.get(option.get("format", kind), str(kind)) + " and".join(bounds)

    def error_message(self, key: Key, value: Any) -> str:
        """Return an error message for ``value`` at ``key``: found, expected, and a suggestion."""
        options = self.at(key)
        advice = _suggest_fix(value, options)
        return f"{format_key(key)} is {format_value(value)}, expected {self.describe(options)}" + (f"; {advice}" if advice else "")

    def write_help(self) -> None:
        """Print every key with its type, default and description, by section, in the width of the terminal."""
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        program = command_of(spec.name.removesuffix(".__main__")) if spec else f"python {Path(sys.argv[0]).name}"
        description = self.root.get("description", "")
        sys.stdout.write(_USAGE.format(program, f"\n{description}\n" if description else ""))
        groups: dict[Key, list[tuple[str, ...]]] = {(): []}
        titles: dict[Key, str] = {(): "top level"}
        for key, field, default in self._rows(self.root):
            description = " ".join(field.get("description", "").split())
            if section := self.section(field):
                description = description or section.get("description", "").partition("\n")[0]
                titles[key] = format_key(key) + " (null unless given)" * (default is None) + f": {description}" * bool(description)
                groups[key] = []
            else:
                shown = "required" if default is _MISSING else format_value(default)
                groups[key[:-1]].append((format_key(key), self.describe(self.alternatives(field)), shown, description))
        widths = [min(limit, max((len(line[i]) for group in groups.values() for line in group), default=0))
                  for i, limit in enumerate((36, 30, 20))]  # fmt: skip
        widths.append(max(24, shutil.get_terminal_size((100, 24)).columns - sum(widths) - 9))
        for key in (key for key, group in groups.items() if group):
            sys.stdout.write(f"\n{titles[key]}\n")
            for line in groups[key]:
                for parts in zip_longest(*(textwrap.wrap(cell, width) for cell, width in zip(line, widths)), fillvalue=""):
                    sys.stdout.write("".join(f"  {part:{width}}" for part, width in zip(parts, widths)).rstrip() + "\n")


_USAGE = """usage: {} [file.yaml] [key=value ...] [--show] [--help]
{}
  --show  print the settings of this run as YAML, which can be run again
  --help  this page

The file overrides defaults, and key=value overrides the file. Values are written as in YAML: step.lr=2e-3 shape=[1,2] name=null
"""


def _choices(options: Sequence[Node]) -> list[Any]:
    return [choice for option in options for choice in option.get("enum", [option["const"]] if "const" in option else ())]


def _suggest_fix(value: Any, options: Sequence[Node]) -> str:
    kinds = {option.get("type") for option in options}
    if isinstance(value, str):
        number = value.replace("_", "")
        if NUMBER.fullmatch(number) and ("number" in kinds or ("integer" in kinds and number.isdigit())):
            return f"write {number}, without quotes"
        if "boolean" in kinds and value.lower() in ("yes", "on", "y", "no", "off", "n"):
            return f"write {format_value(value.lower() in ('yes', 'on', 'y'))}"
        if "null" in kinds and value.lower() == "none":
            return "write null"
        near = close_matches(value, [str(choice) for choice in _choices(options)])
        return f"did you mean {near[0]!r}?" if near else ""
    if isinstance(value, float) and not math.isfinite(value) and "number" in kinds:
        return "write a finite number"
    if isinstance(value, float) and value.is_integer() and "integer" in kinds:
        return f"write {int(value)}"
    if isinstance(value, int | float) and ("string" in kinds and (str(value) in _choices(options) or not _choices(options))):
        return f"text is put in quotes: '\"{format_value(value)}\"'"
    return ""


def format_value(value: Any) -> str:
    """Return ``value`` as YAML of at most 60 characters."""
    if isinstance(value, list):
        text = f"[{', '.join(map(format_value, value))}]"
    elif isinstance(value, dict):
        text = "{" + ", ".join(f"{name}: {format_value(item)}" for name, item in value.items()) + "}"
    else:
        text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def format_first_error(error: pydantic.ValidationError) -> str:
    """Return the first error in one line, for settings that belong to no run, such as those stored with weights."""
    first = error.errors(include_url=False)[0]
    cause = (first.get("ctx") or {}).get("error")  # of a validator, without the prefix that pydantic adds
    return (f"{format_key(first['loc'])}: " if first["loc"] else "") + str(cause or first["msg"])


def format_key(key: Key) -> str:
    """Return a key such as ``chain[1].path``."""
    return "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in key).lstrip(".") or "the settings"


def join_names(names: list[str]) -> str:
    """Return the first dozen of ``names`` in one line."""
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")


def close_matches(word: str, names: Sequence[str]) -> list[str]:
    """Return at most two ``names`` similar to ``word``, the most similar first."""
    plain = {name.lower().replace("-", "_"): name for name in names}
    return [plain[near] for near in difflib.get_close_matches(word.lower().replace("-", "_"), plain, n=2)]
