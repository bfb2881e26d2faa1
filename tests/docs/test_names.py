"""Names of tests: the thing that is tested comes first, so that a search for it finds the test."""

import ast
import re
from collections.abc import Iterator

import pytest

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
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    assert len(files) > 100
    vague = [f"{file.relative_to(ROOT)}::{name}" for file in files for name in pronoun_tests(file.read_text(encoding="utf-8"))]
    assert not vague, "\n".join(vague)


@pytest.mark.parametrize(
    ("name", "begins_with_pronoun"),
    [
        ("test_it_works", True),
        ("test_nothing", True),
        ("test_what_is_wrong_is_told", True),
        ("test_one_that_hangs_is_left_out", True),
        ("test_items_are_sorted", False),
        ("test_whole_image_is_decoded", False),
        ("test_binary_runs_itself", False),
    ],
)
def test_pronoun_at_the_start_of_a_name_is_found(name: str, *, begins_with_pronoun: bool) -> None:
    expected = [name] if begins_with_pronoun else []
    assert [*pronoun_tests(f"async def {name}(): ...")] == expected
    assert [*pronoun_tests(f"class Test:\n    def {name}(self): ...")] == expected
