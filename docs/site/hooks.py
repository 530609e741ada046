"""Events of MkDocs that make a site of this repository: its pages as they lie, its notebooks with outputs, and a search index.

Environment: SITE_NOTEBOOKS=stored shows notebooks without running them, with the outputs of earlier builds where there are any."""

import hashlib
import html
import json
import os
import re
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pygments.formatters import HtmlFormatter

ROOT = Path(__file__).resolve().parents[2]
RUNNER = ROOT / "docs/site/notebook.py"
GENERATED = "build", "datasets", "dist", "runs"
SHOWN = "*.md", "docs/*.png", "docs/*.svg", "docs/*.ipynb", ":!docs/site"
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take the files of the whole checkout, where MkDocs knows one folder; links of pages then hold as they do in the checkout."""
    names = sorted(name for name in list_files() if (ROOT / name).is_file())
    notebooks = [ROOT / name for name in names if name.endswith(".ipynb")]
    shown = {name: File.generated(config, name, abs_src_path=str(ROOT / name)) for name in names if not name.endswith(".ipynb")}
    for stored, executed in zip(notebooks, execute(notebooks)):
        name = stored.relative_to(ROOT).as_posix()
        shown[name] = File.generated(config, name, abs_src_path=str(executed))
        content, images = render_notebook(json.loads(executed.read_text()), Path(name).stem)
        shown[name[:-6] + ".md"] = File.generated(config, name[:-6] + ".md", content=content)
        for image, data in images.items():
            path = f"{Path(name).parent}/{image}"
            shown[path] = File.generated(config, path, content=data)
    for name in names:  # sources to which pages link
        for target in LINK.findall((ROOT / name).read_text()) if name.endswith(".md") else ():
            path = (ROOT / name).parent.joinpath(target).resolve()
            if path.is_file() and path.is_relative_to(ROOT) and (source := path.relative_to(ROOT).as_posix()) not in shown:
                shown[source] = File.generated(config, source, abs_src_path=str(path))
    return Files([*(file for file in files if file.src_dir != config.docs_dir), *shown.values()])


def list_files() -> set[str]:
    """Return the names of the files to show: those that git does not ignore, or in a copy without git, those outside of hidden
    folders, environments and what the project itself generates."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *SHOWN]
    with suppress(OSError):
        names = set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split("\0"))
        if "README.md" in names:
            return names
    names = set()
    for folder, below, files in os.walk(ROOT):
        relative = Path(folder).relative_to(ROOT)
        generated = GENERATED if folder == str(ROOT) else ()
        below[:] = [x for x in below if x[0] != "." and x not in generated and not (Path(folder) / x / "pyvenv.cfg").exists()]
        if relative != Path("docs/site") and Path("docs/site") not in relative.parents:
            suffixes = (".md", ".png", ".svg", ".ipynb") if relative.parts[:1] == ("docs",) else (".md",)
            names |= {(relative / file).as_posix() for file in files if file.endswith(suffixes)}
    return names


def execute(notebooks: list[Path]) -> list[Path]:
    """Return each notebook with outputs: from build/notebooks, or else run, two at a time with one core each."""
    folder = ROOT / "build/notebooks"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def run(notebook: Path) -> Path:
        content = hashlib.sha256(notebook.read_bytes() + RUNNER.read_bytes()).hexdigest()[:16]
        executed = folder / f"{notebook.stem}-{content}.ipynb"
        if executed.is_file():
            return executed
        if os.environ.get("SITE_NOTEBOOKS") == "stored":
            return notebook
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(RUNNER), str(notebook), str(executed)]
        process = subprocess.run(command, env=environment, capture_output=True, text=True)
        if process.returncode:
            raise PluginError(f"{notebook.relative_to(ROOT)} does not run:\n{process.stderr[-4000:]}")
        return executed

    with ThreadPoolExecutor(2) as pool:  # the largest takes 4 GB, and hosts that build pages have 7
        return list(pool.map(run, notebooks))


def render_notebook(notebook: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as a page in Markdown, and its pictures by file name."""
    parts: list[str] = []
    images: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text")})
            if "image/png" in data:
                image = f"{name}-{len(images) + 1}.png"
                images[image] = b64decode(data["image/png"])
                parts.append(f"![Picture {len(images)} of the notebook]({image})")
            else:
                parts.append(f'<pre class="output">{html.escape("".join(data["text/plain"]).rstrip(), quote=False)}</pre>')
    state = "with its outputs" if any(cell.get("outputs") for cell in notebook["cells"]) else "not run in this build"
    parts.insert(1, f"This page is the notebook [{name}.ipynb]({name}.ipynb), {state}.")
    return "\n\n".join(parts) + "\n", images


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link to the page of a notebook where the checkout links to its file."""
    if page.file.abs_src_path is None:  # the page of a notebook, which offers the file
        return markdown
    return LINK.sub(lambda link: re.sub(r"\.ipynb$", ".md", link[1]), markdown)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let tables scroll by themselves, and let pictures open in full size."""
    content = re.sub(r"(<table>.*?</table>)", r'<div class="table" tabindex="0">\1</div>', content, flags=re.S)
    return re.sub(r'(<img [^>]*?src="([^"]+)"[^>]*>)', r'<a class="picture" href="\2">\1</a>', content)


def sections(entries: list[dict[str, str]]) -> Iterator[list[str]]:
    """Yield address, page, heading and text of each section."""
    pages = {entry["location"]: entry["title"] for entry in entries if "#" not in entry["location"]}
    for entry in entries:
        if "#" in entry["location"]:
            yield [entry["location"], pages[entry["location"].partition("#")[0]], entry["title"], entry["text"]]


def on_post_build(config: MkDocsConfig) -> None:
    """Write the search index as a script, which a browser also loads from a folder, and the colours of code."""
    site = Path(config.site_dir)
    index = site / "search/search_index.json"
    found = list(sections(json.loads(index.read_text())["docs"]))
    index.with_name("index.js").write_text(f"window.searchIndex = {json.dumps(found, ensure_ascii=False)};\n")
    index.unlink()
    light, dark = (HtmlFormatter(style=style) for style in ("xcode", "github-dark"))
    colours = light.get_style_defs(".highlight"), dark.get_style_defs('[data-theme="dark"] .highlight')
    (site / "assets/code.css").write_text("\n".join(colours) + "\n")
