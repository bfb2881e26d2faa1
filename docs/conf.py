"""Configuration of the documentation, which `./just docs` builds."""

import shutil
import sys
from pathlib import Path

from sphinx.errors import ConfigError

sys.path[:0] = [str(Path(__file__).parent / "_ext"), str(Path(__file__).parent.parent)]

from app import __version__

if shutil.which("dot") is None:
    raise ConfigError("dot, which draws the diagrams, is not installed; on Debian: apt-get install graphviz")

project = "Nereid"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.graphviz"]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
nitpicky = True

myst_enable_extensions = ["colon_fence", "deflist"]
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
