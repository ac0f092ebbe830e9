"""Sphinx's settings. `make site` builds the site into build/site; every warning is an error."""

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import site_pages  # noqa: E402 (it is in tools/)
from pygments.lexers.special import TextLexer  # noqa: E402

from pycomm._version import __version__  # noqa: E402

project = "pycomm"
author = "pycomm contributors"
copyright = author
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_static"]
html_theme = "furo"
html_title = f"pycomm {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_domain_indices = False

# Headings get the names that GitHub gives them, so that a link works in both places.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["myst.header"]  # a page may skip a level of headings

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_mock_imports = ["torchrec"]  # not installed where the site is built; a base class is of it
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True

highlight_language = "text"  # of blocks without a language: output, error texts
nitpicky = True
# Names of other projects, whose sites cannot be asked while this one is built, and names of ours
# that are no part of the interface.
nitpick_ignore_regex = [
    (
        "py:.*",
        r"(torch|typing|collections|datetime|os|pathlib|nn|dist|numpy|lightning|accelerate)\b.*",
    ),
    ("py:.*", r"(Any|Callable|Mapping|Iterable|Iterator|Sequence|Path|timedelta|Protocol|Future)"),
    ("py:.*", r"(.*\.)?_\w+.*|ErrorType|pycomm\.comm_hooks\.sparse\.\w+"),
]

copybutton_exclude = ".linenos, .gp, .go"


def setup(app: object) -> None:
    """Let tools/site_pages.py prepare each page."""

    def read_page(app: object, name: str, source: list[str]) -> None:
        source[0] = site_pages.page(name, source[0])

    def keep_colons(
        app: object, what: str, name: str, thing: object, options: object, lines: list[str]
    ) -> None:
        if what in ("attribute", "property") and lines:
            lines[0] = f": {lines[0]}"  # or napoleon takes the text before a colon for a type

    app.add_lexer("nft", TextLexer)  # type: ignore[attr-defined]
    app.connect("source-read", read_page)  # type: ignore[attr-defined]
    app.connect("autodoc-process-docstring", keep_colons, priority=100)  # type: ignore[attr-defined]
    importlib.import_module("pycomm.ddp")  # loads the extension: without it, say so at once
