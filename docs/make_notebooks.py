"""The ways in as notebooks: docs/notebooks/<page>.ipynb, made from pages and executed.

    pip install -e ".[all,notebooks]"
    python docs/make_notebooks.py                # pages that changed
    python docs/make_notebooks.py flax           # some, executed again

A page whose code is that of its notebook keeps the outputs: only its text is new.
"""

import base64
import json
import os
import re
import sys
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from make_examples import ROOT, shrink

DOCS = ROOT / "docs"
NOTEBOOKS = DOCS / "notebooks"
PAGES = ("howto/tables", "tutorial", "howto/flax", "howto/last_layer")
BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.M | re.S)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")
# A page that reads the data of the clone is written to be run in its root.
TO_ROOT = "%cd -q ../.."
CELL_SECONDS = 1800  # at most


def cells_of(page: str) -> list[dict[str, Any]]:
    """The page as cells that have not run, its links as seen from the notebooks."""
    path = DOCS / f"{page}.md"
    text = path.read_text()

    def seen_from_here(link: re.Match[str]) -> str:
        return "](" + os.path.relpath(path.parent / link[1], NOTEBOOKS)

    cells = []
    # text and code take turns
    for place, part in enumerate(BLOCK.split(text)):
        if place % 2:
            cells.append(_cell("code", part))
        elif part.strip():
            cells.append(_cell("markdown", LINK.sub(seen_from_here, part)))
    if '"examples/' in text:
        cells.insert(1, _cell("code", TO_ROOT))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    return cells


def _cell(kind: str, source: str) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "metadata": {}, "source": source.strip()}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def execute(cells: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """The notebook of these cells after it ran in the folder."""
    # the extra `notebooks`; `cells_of` needs none
    import nbformat
    from nbclient import NotebookClient

    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = nbformat.from_dict(
        {
            "cells": cells,
            "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
            "nbformat": 4,
            "nbformat_minor": 5,
        }
    )
    NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
    ).execute()
    return notebook


def shown(output: dict[str, Any]) -> dict[str, Any] | None:
    """An output as it is kept: text without the folders of this machine, or a small
    picture. Pages print what they show, so values of other expressions are left out,
    and of the error stream all but reports of health: progress bars.
    """
    if output["output_type"] == "stream":
        if output["name"] == "stderr" and "HealthWarning" not in output["text"]:
            return None
        text = re.sub(r"(?<![\w:/])/\S*/", "", output["text"])
        return {**output, "text": text}
    if "image/png" not in output.get("data", {}):
        return None
    picture = BytesIO()
    shrink(BytesIO(base64.b64decode(output["data"]["image/png"])), picture)
    data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
    return {"output_type": "display_data", "metadata": {}, "data": data}


def code_of(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [cell for cell in cells if cell["cell_type"] == "code"]


def make(page: str, path: Path, again: bool) -> None:
    """Save the notebook of a page, executed if its code is new or `again` is set."""
    cells = cells_of(page)
    sources = [cell["source"] for cell in code_of(cells)]
    done = json.loads(path.read_text()) if path.exists() else {"cells": []}
    before = code_of(done["cells"])
    if again or [cell["source"] for cell in before] != sources:
        with tempfile.TemporaryDirectory() as clone:
            (Path(clone) / "examples").symlink_to(ROOT / "examples")
            folder = Path(clone) / "docs" / "notebooks"
            folder.mkdir(parents=True)
            done = execute(cells, folder)
        for cell in code_of(done["cells"]):
            kept = [shown(output) for output in cell["outputs"]]
            cell["outputs"] = [output for output in kept if output]
        # which Python it was is of no use, and would change with each
        done["metadata"]["language_info"] = {"name": "python"}
    else:
        for cell, executed in zip(code_of(cells), before, strict=True):
            cell |= {name: executed[name] for name in ("execution_count", "outputs")}
        done["cells"] = cells
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n")


def main(names: list[str]) -> None:
    known = {Path(page).name: page for page in PAGES}
    if unknown := sorted(set(names) - set(known)):
        sys.exit(f"no page of these names: {', '.join(unknown)}. Known: {[*known]}.")
    # the kernel sees this copy of the package
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ.pop("MPLBACKEND", None)  # figures go into the notebook
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress"  # tqdm asks for widgets
    for name in names or known:
        print(name, flush=True)
        make(known[name], NOTEBOOKS / f"{name}.ipynb", again=bool(names))


if __name__ == "__main__":
    main(sys.argv[1:])
