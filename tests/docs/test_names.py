"""Names of tests: the thing that is tested comes first, so that a search for it finds the test."""

import ast
import re
from collections.abc import Iterator

from tests.support import ROOT

PRONOUN = re.compile(
    r"test_(its?|this|that|what(ever)?|who(ever)?|nobody|nothing|every(thing|body)|anything|something|others|none|both"
    r"|one)(_|$)"
)


def pronoun_tests(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and PRONOUN.match(node.name):
            yield node.name


def test_names_of_tests_begin_with_no_pronoun() -> None:
    example = "def test_it(): ...\nclass Test:\n    async def test_one_that_hangs(self): ...\n    def test_items(self): ..."
    assert [*pronoun_tests(example)] == ["test_it", "test_one_that_hangs"]
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    assert len(files) > 100
    vague = [f"{file.relative_to(ROOT)}::{name}" for file in files for name in pronoun_tests(file.read_text(encoding="utf-8"))]
    assert not vague, "\n".join(vague)
