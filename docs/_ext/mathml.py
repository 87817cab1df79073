"""Equations as MathML, which browsers draw without a script or the network; TeX that
cannot be read is a warning.
"""

import re
from html import escape

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)
SIZES = re.compile(
    r"\\(?:[bB]igg?[lr]?|textstyle|displaystyle)(?![a-zA-Z])\s*"
)  # MathML stretches by itself
WORDS = re.compile(r"\\mathrm\{([^{}]*)\}")


def converted(node, as_block):
    """MathML of a node, or its TeX with a warning."""
    tex = SIZES.sub("", node.astext()).replace(r"\dots", r"\ldots")
    tex = WORDS.sub(
        lambda word: rf"\text{{{word[1].replace(chr(92) + '_', '_')}}}", tex
    )
    if as_block and ("\\\\" in tex or "&" in tex) and "\\begin" not in tex:
        tex = rf"\begin{{aligned}}{tex}\end{{aligned}}"
    try:
        return tex2mathml(tex, as_block=as_block)
    except MathError as error:
        LOGGER.warning("equation %r: %s", node.astext(), error, location=node)
        return f"<code>{escape(tex)}</code>"


def visit_inline(self, node):
    self.body.append(converted(node, as_block=False))
    raise nodes.SkipNode


def visit_block(self, node):
    self.body.append(f'<div class="math">{converted(node, as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
