"""Sphinx configuration: `make docs` builds the pages into out/docs."""

project = "tnlib"
author = "The tnlib developers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
exclude_patterns = ["pictures"]
autodoc_typehints = "none"  # the docstrings give shapes, which types do not
napoleon_google_docstring = False
