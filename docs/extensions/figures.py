"""Sphinx extension: a picture and the paragraph in italics after it become a figure with a caption.

In Markdown a caption is an ordinary paragraph, so that other renderers show it too:

    ![alternative text](picture.png)

    *Caption.*
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx


def make_figures(app: Sphinx, doctree: nodes.document) -> None:
    """Replace every paragraph that is an image, and its caption, by a figure."""
    for image in list(doctree.findall(nodes.image)):
        paragraph = image.parent
        if not (isinstance(paragraph, nodes.paragraph) and len(paragraph) == 1):
            continue
        figure = nodes.figure("", image.deepcopy(), ids=[f"picture-{Path(image['uri']).stem}"])
        following = paragraph.next_node(descend=False, siblings=True)
        if isinstance(following, nodes.paragraph) and isinstance(following[0], nodes.emphasis) and len(following) == 1:
            figure += nodes.caption("", "", *following[0].children)
            following.parent.remove(following)
        paragraph.replace_self(figure)


def link_to_files(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document) -> None:
    """Link the picture of every figure to its file, so that a tap on a phone opens it in full size."""
    picture = re.compile(r'(<figure [^>]*>\n)(<img [^>]*src="([^"]+)"[^>]*>)')
    if "body" in context:
        context["body"] = picture.sub(r'\1<a class="picture" href="\3">\2</a>', context["body"])


def setup(app: Sphinx) -> dict[str, Any]:
    """Make figures before sphinx collects the files of the images."""
    app.connect("doctree-read", make_figures, priority=100)
    app.connect("html-page-context", link_to_files)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
