"""Whether the tests notice small wrong changes of the code: 28 of 30 mutants that were drawn once, in `mutants.toml`.

`just mutants` measures which tests execute which line, and then tries the mutants: it changes a copy of the project, one mutant at
a time, and runs the tests that execute the changed line until one fails, for a minute at most. Which tests those are, `.coverage`
says. A line that moves to another file moves in `mutants.toml`, too.
"""

import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
from coverage import CoverageData

from tests.support import ROOT

KEPT = Path(__file__).with_name("mutants.toml")
SECONDS = 60


class Mutant(NamedTuple):
    """One line of one file, as it is and as it would be wrong; the line stands in the file once."""

    file: str
    line: str
    mutated: str


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
    run()
