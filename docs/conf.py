"""Configuration of the documentation, which `./just docs` builds."""

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path[:0] = [str(Path(__file__).parent / "_ext"), str(Path(__file__).parent.parent)]

from app import __version__

project = "Nereid"
release = version = __version__
extensions = ["generated", "myst_parser", "sphinx.ext.graphviz"]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
nitpicky = True

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4

graphviz_output_format = "svg"
_FONT = "fontname=Helvetica,Arial,sans-serif"
graphviz_dot_args = ["-Gbgcolor=transparent", f"-G{_FONT}", f"-N{_FONT}", f"-E{_FONT}", "-Nfontsize=12", "-Efontsize=11"]

html_theme = "shibuya"
html_title = "Nereid"
html_favicon = "../app/api/documentation/page/files/icon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_use_index = False
html_theme_options = {
    "accent_color": "blue",
    "show_ai_links": False,  # buttons that open other sites
    "globaltoc_expand_depth": 1,
    "nav_links": [
        {"title": "Tutorial", "url": "tutorial/index"},
        {"title": "How-to guides", "url": "how-to/index"},
        {"title": "Reference", "url": "reference/index"},
        {"title": "Explanation", "url": "explanation/index"},
    ],
}


def _drop_remote_fonts(app: Sphinx, error: Exception | None) -> None:
    """Remove the theme's font for flags, which browsers would load from another host."""
    if error is None:
        style = app.outdir / "_static" / "shibuya.css"
        style.write_text(re.sub(r"@font-face\{[^}]*https:[^}]*\}", "", style.read_text(encoding="utf-8")), encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Register what this project adds to the build."""
    app.connect("build-finished", _drop_remote_fonts)
