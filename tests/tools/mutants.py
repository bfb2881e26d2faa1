"""Whether the tests notice small wrong changes of the code: 28 of 30 mutants that were drawn once, in `mutants.toml`.

`just mutants` measures which tests execute which line, and then tries them. `python -m tests.tools.mutants draw` drew them.

`run` changes a copy of the project, one mutant at a time, and runs the tests that execute the changed line until one fails,
for a minute at most. Which tests those are, `.coverage` says. A line that moves to another file moves in `mutants.toml`, too.
"""

import ast
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from coverage import CoverageData

from tests.support import ROOT

KEPT = Path(__file__).with_name("mutants.toml")
PACKAGES = ("resilience", "triton", "pipeline", "api")
COUNT = 30
SEED = 24
SECONDS = 60

_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_OPERATORS: dict[type[ast.operator], tuple[str, str]] = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+")}


class Mutant(NamedTuple):
    """One line of one file, as it is and as it would be wrong; the line stands in the file once."""

    file: str
    line: str
    mutated: str


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Find every mutant in the functions of a module; what is executed when it is imported belongs to no test."""
    lines = path.read_text(encoding="utf-8").splitlines()
    file = str(path.relative_to(ROOT))
    functions = (node for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    found = dict.fromkeys(
        (number, start, end, text)
        for function in functions
        for statement in function.body
        for node in ast.walk(statement)
        for number, start, end, text in _replacements(node)
    )
    for number, start, end, text in found:
        line = lines[number - 1]
        mutated = line.encode()[:start].decode() + text + line.encode()[end:].decode()
        if lines.count(line) == 1 and mutated != line:
            yield Mutant(file, line, mutated)


def _replacements(node: ast.AST) -> Iterator[tuple[int, int, int, str]]:
    """List what may stand in a node's place: line number, first and last byte in the line, and text."""
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            yield from _between(left, right, *_COMPARISONS[type(operator)])
        case ast.BoolOp(op=operator, values=[left, right]):
            yield from _between(left, right, *(("and", "or") if isinstance(operator, ast.And) else ("or", "and")))
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            yield from _between(left, right, *_OPERATORS[type(operator)])
        case ast.UnaryOp(op=ast.Not(), operand=operand) if node.lineno == operand.lineno:
            yield node.lineno, node.col_offset, operand.col_offset, ""
        case ast.Constant(value=bool(value)):
            yield node.lineno, node.col_offset, node.end_col_offset or 0, str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield node.lineno, node.col_offset, node.end_col_offset or 0, f"{value + 1}"
        case ast.Return(value=ast.expr()) if node.lineno == node.end_lineno:
            yield node.lineno, node.col_offset, node.end_col_offset or 0, "return None"
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Raise() if node.lineno == node.end_lineno:
            yield node.lineno, node.col_offset, node.end_col_offset or 0, "pass"


def _between(left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[tuple[int, int, int, str]]:
    """Replace an operator, if both of its operands are in one line and nothing but it is between them."""
    start, end = left.end_col_offset or 0, right.col_offset
    if left.end_lineno == right.lineno and end - start == len(old) + 2:
        yield right.lineno, start, end, f" {new} "


def draw() -> None:
    modules = sorted(path for package in PACKAGES for path in (ROOT / "app" / package).rglob("*.py"))
    possible = [mutant for path in modules for mutant in mutants_of(path)]
    drawn = random.Random(SEED).sample(possible, COUNT)  # noqa: S311  # nothing secret
    tables = (f"[[mutant]]\nfile = '{file}'\nline = '''{line}'''\nmutated = '''{mutated}'''\n" for file, line, mutated in drawn)
    KEPT.write_text("\n".join(tables), encoding="utf-8")


def tests_of(mutant: Mutant, data: CoverageData) -> list[str]:
    """List the tests that execute a mutant's line, those of the package's own tests first."""
    number = (ROOT / mutant.file).read_text(encoding="utf-8").splitlines().index(mutant.line) + 1
    contexts = data.contexts_by_lineno(str(ROOT / mutant.file)).get(number, [])
    module = Path(mutant.file).with_suffix("").relative_to("app")
    mirror = str(Path("tests") / module.parent)
    named = {context.partition("|")[0] for context in contexts if context}
    return sorted(
        named, key=lambda test: (f"test_{module.name}.py" not in test, not test.startswith(mirror), "system" in test, test)
    )


def caught_by(mutant: Mutant, tests: list[str], copy: Path) -> str:
    """Return the first test that fails with the mutant, the reason that none ran to its end, or nothing."""
    source = copy / mutant.file
    original = source.read_text(encoding="utf-8")
    lines = original.splitlines()
    lines[lines.index(mutant.line)] = mutant.mutated
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    (copy / "tests_of_mutant").write_text("\n".join(tests), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "", "-p", "no:randomly", "-o", "timeout=30", "@tests_of_mutant"]
    with subprocess.Popen(command, cwd=copy, stdout=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(SECONDS, process.send_signal, [signal.SIGINT])  # so that it stops what it has started
        watchdog.start()
        output, _ = process.communicate()
        watchdog.cancel()
    source.write_text(original, encoding="utf-8")
    if process.returncode in (pytest.ExitCode.OK, pytest.ExitCode.INTERRUPTED):
        return ""
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else f"pytest ended with {process.returncode}"


def run() -> None:
    data = CoverageData(str(ROOT / ".coverage"))
    data.read()
    mutants = [Mutant(**table) for table in tomllib.loads(KEPT.read_text(encoding="utf-8"))["mutant"]]
    caught = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".git", ".venv", ".triton", ".*_cache", "__pycache__", ".coverage*")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for name in (".venv", ".triton"):
            (copy / name).symlink_to(ROOT / name)
        for number, mutant in enumerate(mutants, 1):
            tests = tests_of(mutant, data)
            by = caught_by(mutant, tests, copy) if tests else ""
            caught += bool(by)
            print(f"{number:2} {'caught' if by else 'SURVIVES'} {mutant.file}: {mutant.line.strip()} -> {mutant.mutated.strip()}")
            print(f"   {len(tests)} tests execute it; {by}", flush=True)
    print(f"{caught} of {len(mutants)} caught")


if __name__ == "__main__":
    {"draw": draw, "run": run}[sys.argv[1]]()
