"""The recording of a flame graph, with a stand-in for py-spy and a real server."""

import os
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.__main__ import main
from bench.experiments import profile
from bench.harness.triton import Triton
from bench.load.closed_loop import drive_closed_loop
from bench.load.outcome import Outcome

# Writes its options, and the command line of the process that it is told to watch, into the SVG file.
PY_SPY = f"""#!{sys.executable}
import sys
from pathlib import Path
options = dict(zip(sys.argv[3::2], sys.argv[4::2]))
watched = Path("/proc", options["--pid"], "cmdline").read_bytes().replace(bytes(1), b" ").decode()
Path(options["--output"]).write_text("\\n".join([" ".join(sys.argv[1:3]), options["--duration"], watched]))
"""


@pytest.fixture
def folder(tmp_path: Path, fixtures: Triton, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for programs that comes first on the path; loads are short, and the Triton is that of all tests."""

    @contextmanager
    def running() -> Iterator[Triton]:
        yield fixtures

    def drive_shortly(*arguments: Any, seconds: float, **options: Any) -> Coroutine[Any, Any, Outcome]:  # noqa: ANN401
        return drive_closed_loop(*arguments, seconds=min(seconds, 0.4), **options)

    monkeypatch.setattr(profile, "fixture_triton", running)
    monkeypatch.setattr(profile, "drive_closed_loop", drive_shortly)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


def test_a_worker_of_the_server_is_recorded(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = folder / "py-spy"
    program.write_text(PY_SPY, encoding="utf-8")
    program.chmod(0o755)
    out = folder / "out.svg"
    before = set(psutil.Process().children(recursive=True))

    assert main(["profile", "7", str(out), "--workers", "2", "--clients", "2", "--name", "nereid_inline"]) == 0
    options, duration, watched = out.read_text().splitlines()
    assert options == "record --nonblocking"
    assert duration == "7"
    assert watched.startswith("nereid worker-")
    printed = capsys.readouterr().out
    assert printed.startswith(f"{out}: one of 2 workers of nereid_inline, ")
    assert int(printed.split()[-5]) > 0
    assert set(psutil.Process().children(recursive=True)) <= before
