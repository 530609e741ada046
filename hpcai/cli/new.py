"""`hpcai new NAME`: write a model with its app, a simulator of its data and a test. All of it works, and is yours to change.

The files are those of docs/new_model.md with NAME in place of ringdown. In a checkout they go beside those of the other models:
hpcai/models/NAME, apps/NAME, data_prep/NAME.py and tests/apps. Elsewhere, or with --into DIR, the model is a package NAME with
apps/NAME, data_prep/NAME.py and tests beside it, and `hpcai run NAME` works in that folder. No file is overwritten.
"""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path

from hpcai.cli import apps, make_parser
from hpcai.errors import ConfigError
from hpcai.programs import SUITE, command_of, command_of_app

ROOT = SUITE.resolve().parents[1]
"""The checkout; the folder of installed packages if hpcai runs from a wheel."""
PAGE = (SUITE if SUITE.is_dir() else ROOT) / "docs/new_model.md"
_BLOCK = re.compile(r"^`([\w/.]+\.(?:py|yaml))`\n\n```(?:python|yaml)\n(.*?)^```", re.M | re.S)


def main(argv: Sequence[str]) -> None:
    args = make_parser("new", __doc__).parse_args(argv)
    name, checkout = args.name, None if SUITE.is_dir() else ROOT
    root = (args.into or (checkout if checkout and Path.cwd().is_relative_to(checkout) else Path.cwd())).resolve()
    if not re.fullmatch("[a-z][a-z0-9_]{0,23}", name) or iskeyword(name):  # no line of the files becomes too long
        expected = "1 to 24 lower-case letters, digits and underscores, the first one a letter, and no keyword of Python"
        raise ConfigError(f"{name!r} cannot be the name of a model; expected {expected}, such as two_body")
    swaps = {"ringdown": name, "Ringdown": "".join(part.capitalize() for part in name.split("_"))}
    if root != checkout:  # the model is a package of its own
        swaps = {"hpcai.models.ringdown": name, "hpcai/models/ringdown": name, "tests/apps/": "tests/", **swaps}
    rename = partial(re.compile("|".join(map(re.escape, swaps))).sub, lambda match: swaps[match[0]])
    template = _BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    files = {rename(path): rename(text) for path, text in template}
    classes = {f"{swaps['Ringdown']}{end}" for end in ("", "Config")} - {"Ringdown", "RingdownConfig"}
    words = classes.intersection(re.findall(r"\w+", " ".join(text for _, text in template)))  # a class of another file may have it
    if owners := dict.fromkeys([*find_owners(root, name, files), *(f"the word {word} of the files" for word in sorted(words))]):
        raise ConfigError(f"the name {name!r} is taken by {', '.join(owners)}; nothing was written; choose another name")
    write_files(root, files)
    print(f"{root}: {len(files)} new files", *files, sep="\n  ")
    commands = [f"cd {shlex.quote(str(root))}"] if root != Path.cwd() else []
    folder = Path(sys.executable).parent
    if Path(shutil.which("python") or "").parent != folder:
        commands.append(f"export PATH={shlex.quote(str(folder))}:$PATH")
    if find_spec("pytest") is None:
        commands.append("python -m pip install pytest")
    test = next(path for path in files if path.startswith("tests/"))
    commands += [f"{command_of(f'data_prep.{name}')} datasets/{name}", command_of_app(name), f"python -m pytest {test}"]
    print("\nThey make data, train and pass their test as they are:", *commands, sep="\n  ")
    print(f"\nThen change them to your science; {PAGE} explains them.")


def find_owners(root: Path, name: str, files: Iterable[str]) -> Iterator[str]:
    """Yield whatever has the name: files and folders to write, others in apps and data_prep, and a module that would hide the
    package or be hidden by it."""
    targets = {re.sub(rf"(^|/){name}/.*", rf"\1{name}", path) for path in files}
    yield from (str(root / path) for path in sorted(targets) if os.path.lexists(root / path))
    for folder in (*apps.package_folders("apps"), *apps.package_folders("data_prep")):
        yield from (str(path) for path in (Path(folder, name), Path(folder, f"{name}.py")) if path.exists())
    if name in targets and (spec := find_spec(name)) and spec.origin:
        yield f"the module {name} of Python ({spec.origin})"


def write_files(root: Path, files: Mapping[str, str]) -> None:
    """Write new files into new or existing folders: all, or if that fails none. Raises ConfigError."""
    try:
        with ExitStack() as undo:
            for path, text in files.items():
                for folder in reversed((root / path).parents):
                    if not folder.exists():
                        folder.mkdir()
                        undo.callback(folder.rmdir)
                with (root / path).open("x", encoding="utf-8") as file:
                    undo.callback((root / path).unlink)
                    file.write(text)
            undo.pop_all()
    except OSError as error:
        raise ConfigError(f"{error.filename or root}: {error.strerror}; nothing was written; give another --into DIR") from None
