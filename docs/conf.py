"""Sphinx: python -m sphinx -W -b html docs build/docs; -b doctest runs the examples."""

from __future__ import annotations

import doctest
from importlib.metadata import version as version_of

project = "fusedconv"
version = release = version_of("fusedconv")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.doctest", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"fusedconv {version}"
html_show_copyright = False
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_type_aliases = {"Pair": "Pair"}
python_maximum_signature_line_length = 88

doctest_default_flags = doctest.ELLIPSIS  # Sphinx's own also ignore what an error says
doctest_test_doctest_blocks = ""  # only blocks that are marked as doctests
