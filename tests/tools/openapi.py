"""Write the OpenAPI document to docs/reference/openapi.json, with which a test compares what the application generates."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import pytest
from litestar import Litestar

from app.api.caller import keys
from app.host.processes import SEARCH_SOCKET
from app.main import create_app
from app.settings.schema import Settings

FILE = Path(__file__).parents[2] / "docs" / "reference" / "openapi.json"


def document() -> dict[str, Any]:
    """Return the document of a gateway with API keys, with the routes of search, which its own process documents."""
    worker, search = _document_of("on"), _document_of("alone")
    for part, other in ((worker["paths"], search["paths"]), (worker["components"]["schemas"], search["components"]["schemas"])):
        if unlike := [name for name in part.keys() & other.keys() if part[name] != other[name]]:
            raise RuntimeError(f"two things have the same name: {unlike}")
        part.update(other)
    return worker


def _document_of(search: Literal["on", "alone"]) -> dict[str, Any]:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv(SEARCH_SOCKET, str(Path(folder, "search.sock")))
        file = Path(folder, "keys.toml")
        file.write_text(keys.create("any")[1], encoding="utf-8")
        app: Any = create_app(Settings(api_keys_file=str(file), search=search, log_level="error"))
        while not isinstance(app, Litestar):
            app = app.app  # a layer around it
        return app.openapi_schema.to_schema()


def render() -> str:
    """Return the document as text, the same for the same routes."""
    return json.dumps(document(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
