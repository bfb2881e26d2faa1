"""Which Python runs pip, and the models of the embedded Triton."""

import sys
from pathlib import Path

import pytest

from app.host import interpreter, program
from app.host.program import CommandError

VERSION = f"3.{sys.version_info.minor}"


def find() -> interpreter.Interpreter:
    return interpreter.find("a wheel", "use --from")


@pytest.fixture
def own() -> interpreter.Interpreter:
    return find()


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder that is the PATH of the one file."""
    monkeypatch.setattr(program, "IS_ONE_FILE", True)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def put(program: Path, line: str) -> None:
    program.write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
    program.chmod(0o755)


def test_python_runs_itself() -> None:
    assert find().path == sys.executable
    assert find().version == VERSION


@pytest.mark.parametrize("failure", ["exit 1", "echo hello"], ids=["without pip", "something else"])
def test_binary_takes_the_newest_python_that_works(path: Path, failure: str) -> None:
    put(path / "python3.13", failure)
    put(path / "python3.12", """echo '["3.10", "/usr/lib"]'""")
    put(path / "python3.11", f"""echo '["{VERSION}", "/opt/lib", "/usr/lib"]'""")
    put(path / "python3", "exit 1")

    assert find() == interpreter.Interpreter(str(path / "python3.11"), VERSION, [Path("/opt/lib"), Path("/usr/lib")])


def test_binary_passes_over_files_that_are_no_program(path: Path) -> None:
    (path / "python3.13").write_bytes(b"\x7fELF?")
    (path / "python3.13").chmod(0o755)
    put(path / "python3.12", f"""echo '["{VERSION}"]'""")

    assert find().path == str(path / "python3.12")


def test_a_real_python_describes_itself(own: interpreter.Interpreter, path: Path) -> None:
    put(path / "python3", f'exec {sys.executable} "$@"')
    found = find()

    assert (found.version, found.library_folders) == (own.version, own.library_folders)


def test_missing_python_is_one_line(path: Path) -> None:
    assert not list(path.iterdir())

    with pytest.raises(CommandError) as caught:
        find()

    assert str(caught.value) == (
        "a wheel needs Python 3.11, 3.12 or 3.13 with pip and venv, and none is in PATH; on Debian run: "
        "apt-get install python3-pip python3-venv; otherwise use --from"
    )
