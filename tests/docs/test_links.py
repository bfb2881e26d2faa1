"""Links in Markdown files. Those between pages of the documentation are checked when Sphinx builds it."""

from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.anchors import anchors_plugin

from tests.support import ROOT

PATTERNS = ("*.md", "deploy/**/*.md", "docs/*.md", "docs/[!_]*/**/*.md", "examples/**/*.md", "model_repository/*.md")
FILES = sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern))
DOCS = ROOT / "docs"


assert {"CONTRIBUTING.md", "README.md", "deploy/README.md"} <= {str(path.relative_to(ROOT)) for path in FILES}


@cache
def tokens_of(path: Path) -> list[Token]:
    parsed = MarkdownIt().use(anchors_plugin, max_level=6).parse(path.read_text(encoding="utf-8"))
    return [token for outer in parsed for token in (outer, *(outer.children or []))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_something(path: Path) -> None:
    targets = (token.attrGet("href") or token.attrGet("src") for token in tokens_of(path))
    for link in (unquote(str(target)) for target in targets if target):
        parts = urlsplit(link)
        if parts.netloc:
            assert parts.scheme == "https", link
            continue
        target = (path.parent / parts.path).resolve() if parts.path else path
        if DOCS in path.parents and (target == path or DOCS in target.parents):
            continue
        assert target.exists(), link
        if parts.fragment:
            assert parts.fragment in {token.attrGet("id") for token in tokens_of(target)}, link
