"""How this program starts itself again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from app import __version__
from app.host import program
from tests.support import ROOT


def test_a_module_is_found_wherever_the_program_runs(tmp_path: Path) -> None:
    """A package of the same name in the current folder does not take its place."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").write_text("raise SystemExit(7)", encoding="ascii")
    command = program.command("app", "--version")
    done = subprocess.run(command, env=program.environment(), cwd=tmp_path, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, f"nereid {__version__}\n", "")


def test_other_folders_of_modules_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/others")

    assert program.environment()["PYTHONPATH"] == f"{ROOT}:/others"


def test_child_is_told_only_of_descriptors_that_it_inherits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, descriptor in ("LAST_VALID", "7"), ("CACHE", "77"), ("BEATS", ""):
        monkeypatch.setenv(f"NEREID_INTERNAL_{name}_FD", descriptor)

    assert not [name for name in program.environment() if name.startswith("NEREID_INTERNAL_")]
    told = {name: value for name, value in program.environment([7]).items() if name.startswith("NEREID_INTERNAL_")}
    assert told == {"NEREID_INTERNAL_LAST_VALID_FD": "7"}


def test_binary_runs_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(program, "IS_ONE_FILE", True)
    monkeypatch.setattr(program, "ROOT", tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/lib/own")
    monkeypatch.delenv("NEREID_INTERNAL_LAST_VALID_FD")
    (tmp_path / "glibc").write_text("2.31", encoding="ascii")

    assert program.command("app", "api") == [sys.executable, "-m", "app", "api"]
    assert program.environment() == {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "LD_LIBRARY_PATH_ORIG": "/usr/lib/own"}
    assert program.version().startswith(f"{__version__} (one file with Python 3.")
    assert program.version().endswith("; needs glibc 2.31 or later)")
