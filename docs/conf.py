"""Sphinx configuration: `make docs` runs gallery and tutorials, and builds the pages into out/docs."""

import contextlib
import doctest
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

project = "tnlib"
author = "The tnlib developers"
copyright = author
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
html_theme = "furo"
exclude_patterns = ["pictures", "templates"]
templates_path = ["templates"]  # of the pages in docs/reference, one for every public name
autodoc_typehints = "none"  # the docstrings give shapes, which types do not
napoleon_google_docstring = False
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True
myst_heading_anchors = 3  # the gallery is linked by its notions


def run_gallery(app: Sphinx) -> None:
    """Run the code of every page of the gallery in the folder of its pictures; a number that is not so is a warning."""
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    for page in sorted(Path(app.srcdir).glob("gallery-*.md")):
        with contextlib.chdir(Path(app.srcdir) / "pictures"):
            result = doctest.testfile(str(page), module_relative=False, optionflags=options)
        if result.failed:
            logging.getLogger(__name__).warning("%s: %d of %d examples fail", page.name, *result)


def setup(app: Sphinx) -> None:
    """Run the gallery before its pages are read."""
    app.connect("builder-inited", run_gallery)
