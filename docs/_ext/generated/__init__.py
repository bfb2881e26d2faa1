"""A Sphinx extension that fills in what the reference says from the code.

A line `<!-- generated: NAME ARGUMENTS -->` of a page is replaced by the Markdown that the function of this name returns.
"""

import re
from collections.abc import Callable

from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata

from generated import api, command_line, errors, gpus, metrics, settings

_PLACEHOLDER = re.compile(r"^<!-- generated: (\w+)(.*) -->$", re.MULTILINE)
_GENERATORS: dict[str, Callable[..., str]] = {
    "command_line": command_line.render,
    "error": errors.render,
    "gpus": gpus.render,
    "metrics": metrics.render,
    "operations": api.render_operations,
    "schemas": api.render_schemas,
    "settings": settings.render,
}


def _fill(_: Sphinx, __: str, source: list[str]) -> None:
    source[0] = _PLACEHOLDER.sub(lambda found: _GENERATORS[found[1]](*found[2].split()), source[0])


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register the extension."""
    app.connect("source-read", _fill)
    return {"version": "1", "parallel_read_safe": True}
