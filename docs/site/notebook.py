"""Run a notebook without Jupyter and store it with its outputs: python docs/site/notebook.py IN.ipynb OUT.ipynb

A cell's outputs are what it prints, its figures and the value of its last line, in the form in which Jupyter stores them."""

import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt


def run_cell(source: str, label: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell among ``names`` and return its outputs."""
    tree = ast.parse(source)
    last = tree.body[-1] if tree.body else None
    shown = isinstance(last, ast.Expr) and not source.rstrip().endswith(";")  # as in Jupyter, a semicolon hides the value
    with contextlib.redirect_stdout(io.StringIO()) as text:
        exec(compile(ast.Module(tree.body[:-1] if shown else tree.body, []), label, "exec"), names)
        value = eval(compile(ast.Expression(last.value), label, "eval"), names) if isinstance(last, ast.Expr) and shown else None
    outputs: list[dict[str, Any]] = []
    if text.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": text.getvalue().splitlines(keepends=True)})
    for number in plt.get_fignums():
        file = io.BytesIO()
        plt.figure(number).savefig(file, format="png", dpi=120, bbox_inches="tight", facecolor="white")
        image = {"image/png": base64.b64encode(file.getvalue()).decode()}
        outputs.append({"output_type": "display_data", "data": image, "metadata": {}})
    plt.close("all")
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        outputs.append({"output_type": "execute_result", "execution_count": None, "data": data, "metadata": {}})
    return outputs


def main(source: Path, result: Path) -> None:
    notebook = json.loads(source.read_text())
    names: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # a notebook leaves nothing in a checkout
        for number, cell in enumerate(code, 1):
            cell["outputs"] = run_cell("".join(cell["source"]), f"{source.name}, code cell {number}", names)
            cell["execution_count"] = number
    partial = result.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    partial.replace(result)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
