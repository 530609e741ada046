"""The pages as a site: each is in it, its links hold, it needs no network, and a browser shows it as it should."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from html import unescape
from pathlib import Path
from urllib.parse import quote, unquote

import pytest
import yaml
from markdown_it import MarkdownIt

from tests.unit.test_pages import PAGES, ROOT

pytest.importorskip("mkdocs")
HOOKS = runpy.run_path(str(ROOT / "docs/site/hooks.py"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"SITE_NOTEBOOKS": "stored"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_in_the_site_and_its_links_hold_without_a_network(site: Path) -> None:
    assert set(PAGES) <= set(re.findall(r"[\w./-]+\.md", yaml.safe_dump(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])))
    texts = {path.resolve(): path.read_text() for path in site.rglob("*.html")}
    anchors = {path: {"", *re.findall(r'\sid="([^"]*)"', text)} for path, text in texts.items()}
    for path, text in texts.items():
        for element, target in re.findall(r'<(\w+)[^>]*\s(?:href|src)="([^"]*)"', text):
            if element == "a" and target.startswith("https://"):
                continue
            file, _, anchor = unquote(target).partition("#")
            aim = (path.parent / file).resolve() if file else path
            assert aim.is_file() and anchor in anchors.get(aim, {""}), f"{path.relative_to(site)}: <{element}> leads to {target}"
    assert len(texts) > len(PAGES)
    loaded = "\n".join(path.read_text() for path in (site / "assets").glob("*.*s"))
    assert not re.findall(r"https?://|@import|url\(", loaded)


def test_the_hosted_site_is_that_of_make_site() -> None:
    build = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text())["build"]
    first, *_, last = map(str.split, build["commands"])
    assert first[:2] == ["make", "site"] and re.search("^site:", (ROOT / "Makefile").read_text(), re.M)
    assert last[:3] == ["cp", "-r", yaml.safe_load((ROOT / "mkdocs.yml").read_text())["site_dir"]]


def test_a_copy_without_git_has_the_same_site(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = {name for name in HOOKS["list_files"]() if (ROOT / name).is_file()}
    monkeypatch.setenv("GIT_DIR", "/no/repository")
    assert HOOKS["list_files"]() == listed > set(PAGES)


def test_pages_have_the_lists_and_tables_that_commonmark_reads_in_them(site: Path) -> None:
    tags = r"<(h\d|li|ul|ol|table|tr|td|pre|img|strong|blockquote)\b"
    for page in PAGES:
        meant = MarkdownIt("commonmark", {"html": True}).enable("table").render((ROOT / page).read_text())
        text = (site / page.replace("README.md", "index.md").replace(".md", ".html")).read_text()
        shown = re.search(r"<article>(.*)</article>", text, re.S)
        assert shown and Counter(re.findall(tags, shown[1])) == Counter(re.findall(tags, meant)), page


def open_browser(address: str, folder: Path, *options: str) -> str:
    """Return the document that Chromium has of a page when its scripts have run."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("Chromium is not installed (make chromium): the site is not looked at in a browser")
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", *options]
    command += ["--virtual-time-budget=100000", "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.slow
def test_a_browser_shows_all_pages_wide_and_narrow_light_and_dark(site: Path, tmp_path: Path) -> None:
    """Nothing runs over, all pictures are there, tables have lines, and texts stand out from their background."""
    pages = sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))
    shutil.copy(Path(__file__).with_name("look.html"), site)
    document = open_browser(f"file://{site}/look.html#{quote(json.dumps(pages))}", tmp_path, "--allow-file-access-from-files")
    (site / "look.html").unlink()
    faults = re.search(r'<pre id="found">(.*?)</pre>', document, re.S)
    assert faults, document[:4000]
    assert json.loads(unescape(faults[1])) == ["the end"]


def test_search_of_a_folder_finds_a_section(site: Path, tmp_path: Path) -> None:
    page = site / "docs/gpu/index.html"
    document = open_browser(f"file://{page}?q=exit+code+85", tmp_path)
    links = re.findall(r'<a href="([^"]+)"><strong>([^<]+)', document.partition('id="results"')[2].partition("</form>")[0])
    assert len(links) > 2 and any("Reliability" in title for _, title in links)
    address, _, anchor = links[0][0].partition("#")
    assert f'id="{anchor}"' in page.parent.joinpath(address).read_text()


def test_a_notebook_is_shown_with_what_it_prints_and_draws(tmp_path: Path) -> None:
    cells = "import matplotlib.pyplot as plt\nprint('a < b')\nlist('xy')", "plt.plot([1, 2]);", "open('left', 'w')\n1;"
    code = [{"cell_type": "code", "source": [cell]} for cell in cells]
    (tmp_path / "it.ipynb").write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": ["# Title"]}, *code]}))
    runpy.run_path(str(ROOT / "docs/site/notebook.py"))["main"](tmp_path / "it.ipynb", tmp_path / "done.ipynb")
    text, images = HOOKS["render_notebook"](json.loads((tmp_path / "done.ipynb").read_text()), "it")
    parts = "# Title", "with its outputs", '"output">a &lt; b</pre>', '"output">[\'x\', \'y\']</pre>', "plt.plot", "(it-1.png)"
    shown = [text.find(part) for part in parts]
    assert shown == sorted(shown) and shown[0] == 0 and text.count('"output"') == 2, text
    assert list(images) == ["it-1.png"] and images["it-1.png"].startswith(b"\x89PNG")
    assert sorted(os.listdir(tmp_path)) == ["done.ipynb", "it.ipynb"]
