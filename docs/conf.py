"""Configuration of the site; `make docs` builds it. Neither the build nor the pages
fetch anything.
"""

import inspect
import sys
from pathlib import Path
from typing import get_type_hints

sys.path[:0] = [str(Path(__file__).parent / "_ext"), str(Path(__file__).parent.parent)]

import numpyro_bnn  # noqa: E402

project = "numpyro_bnn"
author = "the authors of numpyro_bnn"
version = release = numpyro_bnn.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "mathml",
    "example_page",
    "notebook_page",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_ext", "figures"]
html_theme = "furo"
html_title = f"{project} {version}"
html_math_renderer = "mathml"
html_copy_source = False
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_search_scorer = str(Path(__file__).parent / "_ext" / "scorer.js")
smartquotes = False  # a prime is not a quotation mark

myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3

# Inherited docstrings would repeat those of the base class under every kernel.
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autosummary_generate = False
add_module_names = False
python_maximum_signature_line_length = 100

# A reference to a public name of this package must be found. Names of others are not
# looked up, for that would need the network; nor private classes
# (numpyro_bnn.room.module.Name), which only annotations name.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(?!numpyro_bnn\b).*|numpyro_bnn\.\w+\.[a-z_.]+\._?[A-Z]\w*")
]


def is_generated_field(app, what, name, obj, skip, options):
    """Fields of named tuples are described with `:param:`; Python's default docstring
    for each is dropped.
    """
    return (
        True
        if inspect.isdatadescriptor(obj) and type(obj).__name__ == "_tuplegetter"
        else None
    )


def add_contents(app, what, name, obj, options, lines):
    """After the description of a room, a line for each of its public names."""
    if what == "module" and hasattr(obj, "__all__"):
        names = [
            f"   {public}" for public in obj.__all__ if callable(getattr(obj, public))
        ]
        lines += ["", ".. autosummary::", "   :nosignatures:", "", *names, ""]


def show_plain_types(app, obj, bound_method):
    """Signatures show the types of options; the text says which values
    they may have.
    """
    function = inspect.unwrap(obj)
    if inspect.isfunction(function):
        function.__annotations__ |= get_type_hints(function)


def keep_errors_with_means(app, docname, source):
    """A line may break before the error of a figure, as narrow screens need, but not
    after its sign.
    """
    source[0] = source[0].replace(" ± ", " ±\N{NO-BREAK SPACE}")


def setup(app):
    app.connect("source-read", keep_errors_with_means)
    app.connect("autodoc-process-docstring", add_contents)
    app.connect("autodoc-before-process-signature", show_plain_types)
    app.connect("autodoc-skip-member", is_generated_field)
