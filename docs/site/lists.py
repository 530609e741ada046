"""Events of MkDocs by which its Python-Markdown reads lists as CommonMark does, and so as code hosts show them."""

import re

from markdown import Markdown
from markdown.blockprocessors import build_block_parser
from markdown.extensions import Extension
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page


class ShortIndent(Extension):
    """Two spaces put a line into an item of a list, where Python-Markdown asks for four."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        md.tab_length = 2
        md.parser = build_block_parser(md)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.markdown_extensions.insert(0, ShortIndent())  # before those that add to the parser
    return config


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put an empty line where an item of a list ends an indented block, which in Python-Markdown would go on."""
    lines: list[str] = []
    first = 0  # indentation of the block's first line
    fenced = False
    for line in markdown.splitlines():
        text = line.lstrip()
        indent = len(line) - len(text)
        fenced ^= text.startswith("```")
        if not fenced and lines and lines[-1] and indent < first and re.match(r"([-*+]|\d+\.) ", text):
            lines.append("")
        if not lines or not lines[-1]:
            first = indent
        lines.append(line)
    return "\n".join(lines) + "\n"
