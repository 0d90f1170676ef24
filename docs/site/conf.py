"""Sphinx: settings of the documentation site, which build.py lays out."""

import re

import pariskv_core

project = "pariskv_core"
author = "the authors of pariskv_core"
version = release = pariskv_core.__version__
extensions = ["breathe", "myst_parser", "sphinx.ext.autodoc"]
breathe_projects = {"headers": "../xml"}
breathe_default_project = "headers"
exclude_patterns = ["headers/*.rst"]  # parts of docs/cpp.md
html_theme = "furo"
html_title = f"pariskv_core {release}"
html_show_copyright = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
autodoc_typehints = "none"
suppress_warnings = ["misc.highlighting_failure"]  # blocks that show a session, not a program


ALIGNED = re.compile(r"^\s|\S {2,}\S")


def as_text(app, what, name, thing, options, lines):
    """Docstrings are plain text: paragraphs become prose, unless they are aligned by hand."""
    text = "\n".join(lines).strip()
    if text.startswith("(self) ->"):  # nanobind's, of a property without words
        text = text.replace("(self) -> ", "").replace("pariskv_core._core.", "")
    out = []
    for paragraph in text.split("\n\n"):
        rows = paragraph.split("\n")
        if any(ALIGNED.search(row) for row in rows):
            out += [".. code-block:: none", "", *(f"   {row}" for row in rows), ""]
        else:
            marked = (row.replace("*", r"\*").replace("|", r"\|") for row in rows)
            out += [*(row.replace("`", "").rstrip("_") for row in marked), ""]
    lines[:] = out


def shortened(app, what, name, thing, options, signature, returns):
    """Names of types without the modules that they are in."""
    modules = re.compile(r"(pariskv_core\._core|pariskv_core\._array|collections\.abc|typing)\.")
    return tuple(part and modules.sub("", part) for part in (signature, returns))


def setup(app):
    app.connect("autodoc-process-docstring", as_text)
    app.connect("autodoc-process-signature", shortened)
