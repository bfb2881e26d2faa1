"""Texts against what they are about: links, codes of errors, metrics, versions of clients, and names of tests."""

import ast
import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.anchors import anchors_plugin
from prometheus_client.core import CounterMetricFamily

from app import errors, feature
from app.errors import GatewayError
from app.resilience.worker_table import WorkerTable
from app.telemetry.metrics import Metrics
from tests.callers import client as clients
from tests.support import ROOT

ERRORS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, GatewayError) and value is not GatewayError
]
PATTERNS = ("*.md", "deploy/**/*.md", "docs/*.md", "docs/[!_]*/**/*.md", "examples/**/*.md", "model_repository/*.md")
DOCS = ROOT / "docs"
VERSION = re.compile(
    r'(?:\bnereid:|\bnereid_\w+-|^__version__ = "|^version = "|^  "version": "|"nereid":"|Status: )(\d+\.\d+\.\d+)', re.MULTILINE
)
"""As it stands in names of images and wheels, in projects, and in examples of answers."""
FUNCTION = ast.FunctionDef, ast.AsyncFunctionDef
PRONOUN = re.compile(
    r"test_(its?|this|that|what(ever)?|who(ever)?|nobody|nothing|every(thing|body)|anything|something|others|none|both"
    r"|one)(_|$)"
)


@cache
def tokens_of(path: Path) -> list[Token]:
    parsed = MarkdownIt().use(anchors_plugin, max_level=6).parse(path.read_text(encoding="utf-8"))
    return [token for outer in parsed for token in (outer, *(outer.children or []))]


def leads_to_something(path: Path, link: str) -> bool:
    """Return whether a link in a file works; those between pages of the documentation are checked when Sphinx builds it."""
    parts = urlsplit(link)
    if parts.netloc:
        return parts.scheme == "https"
    target = (path.parent / parts.path).resolve() if parts.path else path
    if DOCS in path.parents and (target == path or DOCS in target.parents):
        return True
    return target.exists() and (not parts.fragment or parts.fragment in {token.attrGet("id") for token in tokens_of(target)})


def test_links_in_markdown_files_lead_to_something() -> None:
    files = sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern))
    assert {"CONTRIBUTING.md", "README.md", "deploy/README.md"} <= {str(path.relative_to(ROOT)) for path in files}
    links = [(path, token.attrGet("href") or token.attrGet("src")) for path in files for token in tokens_of(path)]

    assert [(path, link) for path, link in links if link and not leads_to_something(path, unquote(str(link)))] == []


def test_names_of_tests_begin_with_no_pronoun() -> None:
    """The thing that is tested comes first, so that a search for it finds the test."""
    assert PRONOUN.match("test_one_that_hangs")
    assert not PRONOUN.match("test_items")
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    names = [
        (file, node.name) for file in files for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, FUNCTION)
    ]

    assert len(names) > 1000
    assert [f"{file.relative_to(ROOT)}::{name}" for file, name in names if PRONOUN.match(name)] == []


def test_each_code_has_a_cause_and_a_cure() -> None:
    page = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    _, *sections = re.split(r"^### ", page.partition("\n## Codes of NGINX\n")[0], flags=re.MULTILINE)
    codes = [section.partition("\n")[0] for section in sections]

    assert sorted(codes) == sorted([*(error.code for error in ERRORS), "internal_error", "method_not_allowed", "not_found"])
    for code, section in zip(codes, sections, strict=True):
        assert re.search(r"\n\nCause\n: .+\n\nCure\n: ", section, re.DOTALL), code
        assert code not in {error.code for error in ERRORS} or f"\n<!-- generated: error {code} -->\n" in section


def test_errors_have_codes_of_their_own_and_only_temporary_ones_say_when_to_retry() -> None:
    assert len({error.code for error in ERRORS}) == len(ERRORS)
    assert {error.status for error in ERRORS if error.retry_after_seconds is not None} == {429, 503}
    assert all(error.retry_after_seconds is not None for error in ERRORS if error.status in {429, 503})


def test_each_code_of_nginx_is_explained() -> None:
    config = (ROOT / "deploy" / "nginx" / "nereid.conf").read_text(encoding="utf-8")
    codes = re.findall(r"^    \w+ (\w+);$", config.partition("map $status $nereid_code {")[2].partition("}")[0], re.MULTILINE)
    page = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")

    assert "rate_limited" in codes
    assert [code for code in codes if f"### {code}\n" not in page and f"`{code}`" not in page] == []


def test_the_runbook_names_metrics_that_exist(table: WorkerTable) -> None:
    families = list(Metrics(table, "1.2.3", feature.instruments(table)).collect())
    names = {family.name + ("_total" if isinstance(family, CounterMetricFamily) else "") for family in families}
    text = (DOCS / "how-to" / "runbook.md").read_text(encoding="utf-8")

    assert names >= set(re.findall(r"`((?:api|nereid)_[a-z_]+)`", text)) != set()


def test_the_table_of_clients_has_the_pinned_versions() -> None:
    """After a change: `./just clients --record`."""
    assert clients.pins().items() <= {(row.client, row.version) for row in clients.read()}


def test_version_stands_everywhere_as_in_pyproject() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    files = subprocess.check_output(["git", "grep", "-Il", ".", "--", ":!tests", ":!requirements"], cwd=ROOT, text=True)
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in files.split()}
    found = {name: set(VERSION.findall(text)) for name, text in texts.items() if VERSION.search(text)}

    assert {"README.md", "app/__init__.py", "compose.yaml", "docs/reference/health.md"} < found.keys()
    assert {name: versions for name, versions in found.items() if versions != {version}} == {}
