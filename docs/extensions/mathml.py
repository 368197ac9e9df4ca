"""Sphinx extension: formulas as MathML, which browsers render without scripts and without network access.

The converter is that of docutils. It puts an index below a letter with an accent, unless the index has an empty base:
write `\\hat x{}_i`, not `\\hat x_i`.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator


def inline(translator: HTML5Translator, node: nodes.math) -> None:
    """Write an inline formula."""
    translator.body.append(mathml(node, as_block=False))
    raise nodes.SkipNode


def displayed(translator: HTML5Translator, node: nodes.math_block) -> None:
    """Write a displayed formula, which scrolls where the screen is narrower."""
    translator.body.append(f'<div class="math">{mathml(node, as_block=True)}</div>\n')
    raise nodes.SkipNode


def mathml(node: nodes.math | nodes.math_block, *, as_block: bool) -> str:
    """Return the MathML of a formula; TeX that the converter does not know is a warning."""
    try:
        code = str(tex2mathml(node.astext(), as_block=as_block))
    except MathError as error:
        logging.getLogger(__name__).warning("%s: %s", error, node.astext(), location=node)
        return ""
    # both bars of a norm in one size: the closing one is inside of its index, where it would not stretch
    return re.sub(r"<mo[^>]*>‖</mo>", '<mo stretchy="false">‖</mo>', code)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (inline, None), (displayed, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
