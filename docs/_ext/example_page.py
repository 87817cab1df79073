"""The directive `{example} NAME`: what a script says of itself, its command, what it printed and drew, its source."""

import ast
from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = """\
{about}

## Run

```console
{printed}
```

{figures}

## Source

```{{literalinclude}} ../../examples/{name}.py
:language: python
```
"""


def page(name: str) -> str:
    """The Markdown of a script's page, below its title."""
    about = ast.get_docstring(ast.parse((ROOT / "examples" / f"{name}.py").read_text()))
    folder = ROOT / "docs" / "figures"
    printed = (folder / f"{name}.txt").read_text().strip()
    figures = [f"![{png.stem}](../figures/{png.name})" for png in sorted(folder.glob(f"{name}*.png"))]
    return PAGE.format(about=about, printed=printed, name=name, figures="\n\n".join(figures))


class Example(SphinxDirective):
    """Made by `docs/make_examples.py`, read when the site is built."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(page(self.arguments[0]), allow_section_headings=True)


def setup(app):
    app.add_directive("example", Example)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
