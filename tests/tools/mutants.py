"""Whether the tests notice small wrong changes of the code: the mutants of `mutants.toml`, which were drawn once from all packages.

`just mutants` measures which tests execute which line, and then tries the mutants: it changes a copy of the project, one mutant at
a time, and runs the tests that execute the changed lines until one fails, for 100 seconds at most. Which tests those are,
`.coverage` says. Lines that move to another file move in `mutants.toml`, too.
"""

import argparse
import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from coverage import CoverageData

from tests.support import ROOT, SHARED

_INSTALLED = (".venv", ".triton", ".postgres")


class Mutant(NamedTuple):
    """Lines of a file, as they are and as they would be wrong. They stand in the file once; `line` is where they stood."""

    file: str
    line: int
    original: str
    mutated: str
    equivalent: str = ""
    """Why no test can notice it."""


def place(mutant: Mutant, text: str) -> int | None:
    """Return where the lines of a mutant begin in its file, unless they stand there twice or no longer."""
    places = [match.start() for match in re.finditer(f"^{re.escape(mutant.original)}$", text, re.MULTILINE)]
    return places[0] if len(places) == 1 else None


def main() -> None:
    parser = argparse.ArgumentParser(description="Change the code in small wrong ways, and see which the tests notice.")
    parser.add_argument("--kept", type=Path, default=Path(__file__).with_name("mutants.toml"), help="the file with the mutants")
    parser.add_argument("--seconds", type=float, default=100, help="time for each mutant")
    parser.add_argument("parts", nargs="*", default=["app/"], metavar="PART", help="the first letters of files, such as app/search")
    options = parser.parse_args()
    kept = tomllib.loads(options.kept.read_text(encoding="utf-8"))["mutant"]
    run([Mutant(**table) for table in kept], options.parts, options.seconds)


class Contexts:
    """Which tests execute what, and how many lines each executes in all: the fewer, the nearer it is to each of them."""

    def __init__(self) -> None:
        self._data = CoverageData(str(ROOT / ".coverage"))
        self._data.read()
        self._lines = Counter(test for file in self._data.measured_files() for test in self._tests(file))

    def _tests(self, file: str, lines: Iterable[int] | None = None) -> list[str]:
        contexts = self._data.contexts_by_lineno(file)
        named = (context for line in (contexts if lines is None else lines) for context in contexts.get(line, ()))
        return [_without_phase(context) for context in named if context]

    def _tests_of_folder(self, folder: Path) -> list[str]:
        tests = []
        for path in folder.glob("*.py"):
            lines = {node.lineno for node in _in_functions(path.read_text(encoding="utf-8"))}
            tests += self._tests(str(path), lines)
        return tests

    def tests_of(self, mutant: Mutant) -> list[str]:
        """List the tests that execute the statement of a mutant; those of its package come first.

        Of what runs only when a module is imported, these are the tests that execute functions of its package.
        """
        path = ROOT / mutant.file
        module = path.relative_to(ROOT / "app").with_suffix("")
        if path.suffix == ".py":
            text = path.read_text(encoding="utf-8")
            begin = text.count("\n", 0, place(mutant, text)) + 1
            end = begin + mutant.original.count("\n")
            around = [node for node in _in_functions(text) if node.lineno <= begin and end <= (node.end_lineno or 0)]
            tests = self._tests(str(path), range(around[-1].lineno, end + 1)) if around else self._tests_of_folder(path.parent)
        else:  # what applies the files of a folder is the module of its name
            tests = self._tests(str(path.parent.with_suffix(".py")))
        package = str(Path("tests") / module.parent)
        return sorted(
            set(tests),
            key=lambda test: (f"test_{module.name}.py" not in test, not test.startswith(package), self._lines[test], test),
        )


def _in_functions(text: str) -> Iterator[ast.stmt]:
    """Yield the statements in the functions of a module, inner ones after those that contain them."""
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in function.body:
                yield from (node for node in ast.walk(statement) if isinstance(node, ast.stmt))


@cache  # of the few contexts that there are, most execute thousands of lines
def _without_phase(context: str) -> str:
    return re.sub(r"\|(setup|run|teardown)$", "", context)


@contextmanager
def copied() -> Iterator[Path]:
    """Copy the project to where it may be changed."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".git", *_INSTALLED, ".*_cache", "__pycache__", ".coverage*")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for name in _INSTALLED:
            (copy / name).symlink_to(ROOT / name)
        if SHARED.exists():
            (copy.parent / SHARED.name).symlink_to(SHARED)
        yield copy


def fail(tests: Iterable[str], copy: Path, seconds: float, *options: str) -> list[str]:
    """Run tests until the time is over; return which failed and why, or the reason why none ran."""
    arguments = "\n".join(tests).replace(str(ROOT), str(copy))  # some have the path of a file
    (copy / "tests_of_mutant").write_text(arguments, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-v", "-m", "", "-p", "no:randomly", *options, "@tests_of_mutant"]
    # Compiled once, what is not mutated is imported in half the time.
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(copy.parent / "bytecode")}
    environment = os.environ | bytecode | {"COLUMNS": "250"}  # of the summary's lines
    with subprocess.Popen(
        command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        ends = (
            threading.Timer(seconds, process.send_signal, [signal.SIGINT]),  # so that it stops what it has started
            threading.Timer(seconds + 60, process.kill),
        )
        began = time.monotonic()
        for end in ends:
            end.start()
        output, _ = process.communicate()
        for end in ends:
            end.cancel()
    failed = [line.split(" ", 1)[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    failed = failed or re.findall(r"^(\S+::.*) (?:FAILED|ERROR)\b", output, re.MULTILINE)  # of one that has not ended
    if gone := tuple(re.findall(r"^ERROR: not found: (\S+)", output, re.MULTILINE)):  # since the contexts were measured
        return fail([test for test in tests if not str(copy / test).startswith(gone)], copy, seconds, *options)
    if failed or process.returncode == pytest.ExitCode.OK or time.monotonic() > began + seconds:
        return failed
    return [f"pytest ended with {process.returncode}: {' '.join(output.splitlines()[-1:])}"]


def caught_by(mutant: Mutant, tests: list[str], copy: Path, seconds: float) -> str:
    """Return the first test that fails with a mutant, and why, or nothing."""
    source = copy / mutant.file
    original = source.read_text(encoding="utf-8")
    begin = place(mutant, original) or 0
    source.write_text(original[:begin] + mutant.mutated + original[begin + len(mutant.original) :], encoding="utf-8")
    failed = fail(tests, copy, seconds, "-x", "-o", f"timeout={seconds / 2}", "-o", "timeout_func_only=true")
    source.write_text(original, encoding="utf-8")
    return failed[0] if failed else ""


def run(mutants: list[Mutant], parts: list[str], seconds: float) -> None:
    contexts = Contexts()
    tally: Counter[str] = Counter()
    catching = set()
    with copied() as copy:
        for mutant in (mutant for part in parts for mutant in mutants if mutant.file.startswith(part)):
            tests, by, began = [], "", time.monotonic()
            if mutant.equivalent:
                result = "equivalent"
            elif not (ROOT / mutant.file).exists() or place(mutant, (ROOT / mutant.file).read_text(encoding="utf-8")) is None:
                result = "GONE"
            else:
                tests = contexts.tests_of(mutant)
                by = caught_by(mutant, tests, copy, seconds) if tests else ""
                result = "caught" if by else "SURVIVES"
                catching |= {by.partition(" - ")[0]} & set(tests)
            tally[result] += 1
            print(f"{result} {mutant.file}:{mutant.line}: {mutant.original.strip()} -> {mutant.mutated.strip()}")
            print(f"   {len(tests)} tests execute it; {time.monotonic() - began:.0f} s; {by or mutant.equivalent}", flush=True)
        print(f"{', '.join(f'{count} {result}' for result, count in sorted(tally.items()))}, of {tally.total()}")
        if catching and (failed := fail(sorted(catching), copy, 3600)):
            print("Without a mutant, these fail, too:", *failed, sep="\n")


if __name__ == "__main__":
    main()
