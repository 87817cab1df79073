"""The directive `{example} NAME`: what a script says of itself, its command, what it
printed, its source.

The page itself shows the figures, so that each has a text that says what it shows, also
where Markdown is read.
"""

import ast
from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parent.parent.parent
FIGURES = ROOT / "docs" / "figures"
# Text without a heading would come after all sections.
PAGE = """\
## What it does

{about}

## Run

```console
{printed}
```

## Source

```{{literalinclude}} ../../examples/{name}.py
:language: python
```
"""


def page(name: str) -> str:
    """The Markdown of a script's page, below its title."""
    about = ast.get_docstring(ast.parse((ROOT / "examples" / f"{name}.py").read_text()))
    printed = (FIGURES / f"{name}.txt").read_text().strip()
    return PAGE.format(about=about, printed=printed, name=name)


def not_shown(name: str, text: str) -> list[str]:
    """Figures of the script that a page lacks."""
    return [
        png.name
        for png in sorted(FIGURES.glob(f"{name}*.png"))
        if f"](../figures/{png.name})" not in text
    ]


class Example(SphinxDirective):
    """Made by `docs/make_examples.py`, read when the site is built."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        if missing := not_shown(
            self.arguments[0], Path(self.env.doc2path(self.env.docname)).read_text()
        ):
            raise self.error(f"The page does not show {', '.join(missing)}.")
        return self.parse_text_to_nodes(
            page(self.arguments[0]), allow_section_headings=True
        )


def setup(app):
    app.add_directive("example", Example)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
