"""Work on the project: the script that sets it up, recipes without what they need, and the checks at the end of tests."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from app.settings.schema import Settings
from tests.support import ROOT

JUST = Path(sys.executable).with_name("just")

Lines = list[str]
Run = Callable[..., tuple[int, Lines, Lines]]


def write_script(file: Path, script: str) -> None:
    file.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    file.chmod(0o755)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run `./just` or `just` in a fresh copy; return its exit code, and the lines of its output and errors.

    The environment that it makes has only the given programs, which are shell scripts.
    """
    clone = tmp_path / "a clone"
    shutil.copytree(ROOT / "requirements", clone / "requirements")
    (clone / "clients" / "python").mkdir(parents=True)
    shutil.copy(ROOT / "clients" / "python" / "pyproject.toml", clone / "clients" / "python")
    for name in ("just", "justfile"):
        shutil.copy(ROOT / name, clone)
    python, programs = tmp_path / "python", tmp_path / "programs"
    programs.mkdir()
    write_script(
        python, f"[ \"$*\" = '-m venv --clear .venv' ] || exec '{sys.executable}' \"$@\"\nmkdir .venv; cp -r '{programs}' .venv/bin"
    )

    def run(
        just: str | Path, *arguments: str, scripts: Mapping[str, str] = MappingProxyType({}), compiler: str = "true"
    ) -> tuple[int, Lines, Lines]:
        for name, script in scripts.items():
            write_script(programs / name, script)
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PIP_")},
            "CC": compiler,
            "PYTHON": str(python),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": "http://127.0.0.1:1/",
            "PIP_RETRIES": "1",
            "PIP_TARGET": str(tmp_path / "target"),
        }
        done = subprocess.run([just, *arguments], env=environ, cwd=clone / "clients", capture_output=True, text=True, check=False)
        errors = done.stderr.replace("\033[1m", "").replace("\033[0m", "")
        return done.returncode, done.stdout.splitlines(), errors.splitlines()

    return run


def test_first_start_without_a_network_is_one_line(run: Run, tmp_path: Path) -> None:
    """Pip reports it in many lines, the last of which says that there is no such package."""
    # Instead of an environment, whose pip takes seconds to install, one with the pip of this Python.
    code, output, errors = run("../just", "serve", scripts={"pip": f'exec "{sys.executable}" -m pip "$@"'})

    assert (code, output) == (1, [])
    assert errors == [
        "nereid: creating .venv",
        "nereid: the package index cannot be reached; is there a network, and is pip configured for it?",
    ]
    assert not (tmp_path / "a clone" / ".venv" / "locked").exists()


@pytest.mark.parametrize("just", ["../just", JUST], ids=["script", "program"])
def test_fresh_copy_is_set_up_once_before_its_recipes(just: str | Path, run: Run) -> None:
    outputs = ["-m tests.tools.openapi", "-m tests.tools.kubernetes_rules"]
    steps = ["creating .venv", "installing the locked environment (pillow-simd is compiled: about half a minute)"]
    scripts = {"pip": "", "uv": "", "just": f'exec "{JUST}" "$@"', "python": 'echo "$*"'}

    assert run(just, "openapi", "rules", scripts=scripts) == (0, outputs, [f"nereid: {step}" for step in steps])
    assert run(just, "openapi", "rules") == (0, outputs, [])


HOLDING = """
import os, threading, pytest
from app.embedded.folder import TritonFolder
from app.resilience.worker_table import WorkerTable
from app.settings.schema import Settings
from tests import leftovers

leftovers._GRACE_SECONDS = 0
folders = [TritonFolder(Settings(triton_home=os.path.join(os.path.dirname(__file__), name))) for name in ("session", "test")]

@pytest.fixture(scope="session")
def shared():
    folders[0].claim()
    yield
    for folder in folders:
        folder.give_up()
        folder.path.rmdir()

def test_one(shared):
    folders[1].claim()
    WorkerTable()
    threading.Thread(target=threading.Event().wait, name="check_0", daemon=True).start()

def test_another():
    WorkerTable().close()
"""


def test_module_that_holds_a_lock_memory_or_a_thread_fails(tmp_path: Path) -> None:
    (tmp_path / "test_holding.py").write_text(HOLDING, encoding="utf-8")
    options = ("-p", "tests.leftovers", "-p", "no:cacheprovider", f"--rootdir={tmp_path}")
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # it starts faster
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    folder = Settings(triton_home=str(tmp_path / "test")).triton_folder
    expected = rf"{folder} \(\d+\), /memfd:nereid-workers \(deleted\) \(\d+\), thread check_0 \(\d+\)$"
    assert re.search(rf"AssertionError: test_holding.py has left behind {expected}", done.stdout, re.MULTILINE), done.stdout
    assert "2 passed, 1 error" in done.stdout
