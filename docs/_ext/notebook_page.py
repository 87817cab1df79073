"""The directive `{notebook} NAME`: an executed notebook below the title of its page.

`docs/make_notebooks.py` makes the notebooks from pages; their links are seen from
`docs/notebooks`, where the page of a notebook lies too.
"""

import json
from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
PICTURE = '<img alt="The picture that this cell draws" src="data:image/png;base64,{}"/>'


class Notebook(SphinxDirective):
    """Read when the site is built."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        path = NOTEBOOKS / f"{self.arguments[0]}.ipynb"
        self.env.note_dependency(str(path))
        cells = json.loads(path.read_text())["cells"]
        # below the title of the page, as all other headings
        cells[0]["source"] = "#" + cells[0]["source"]
        return self.parse_text_to_nodes(
            "\n\n".join(map(shown, cells)), allow_section_headings=True
        )


def shown(cell):
    """Markdown of a cell with its outputs.

    >>> shown({"cell_type": "markdown", "source": "## A"})
    '## A'
    """
    if cell["cell_type"] == "markdown":
        return cell["source"]
    parts = [f"```python\n{cell['source']}\n```"]
    for output in cell["outputs"]:
        if "text" in output:
            parts.append(f"```console\n{output['text'].rstrip()}\n```")
        else:
            picture = PICTURE.format(output["data"]["image/png"])
            parts.append(f"```{{raw}} html\n{picture}\n```")
    return "\n\n".join(parts)


def setup(app):
    app.add_directive("notebook", Notebook)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
