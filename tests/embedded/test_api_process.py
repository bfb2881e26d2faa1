"""One instance of the API as a child process, with stand-ins for Python, which would run it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.embedded.api_process import ApiProcess
from app.embedded.service import CheckError
from app.host.program import CommandError
from app.settings.schema import Settings
from tests.fakes.http import scripted
from tests.processes import children, nothing_left_running, wait_for, wait_until_gone  # noqa: F401 - a fixture
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture
from tests.support import ROOT, free_port

LIVE = "n=0; while [ $((n += 1)) -lt 1200 ]; do sleep 0.05; done"
"""A minute in which a shell script handles signals."""


@pytest.fixture(autouse=True)
def own_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start without a table of workers, and close the one that was created."""
    monkeypatch.setenv("NEREID_INTERNAL_WORKER_TABLE_FD", "")  # restored in the end, whatever is written
    yield
    if os.environ["NEREID_INTERNAL_WORKER_TABLE_FD"]:
        os.close(int(os.environ["NEREID_INTERNAL_WORKER_TABLE_FD"]))


def written(folder: Path, script: str) -> Path:
    program = folder / "api"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    return program


@contextmanager
def running(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Iterator[ApiProcess]:
    """Run a shell script in the API's place until the block ends; it notes something before it goes on."""
    monkeypatch.setattr(sys, "executable", str(written(folder, script)))
    process = ApiProcess(Settings(workers=3), folder / "nereid-1.sock")
    process.spawn()
    try:
        wait_for(lambda: process.poll() is not None or (folder / "notes").is_file())
        yield process
    finally:
        process.kill()


def notes(folder: Path) -> Path:
    return folder / "notes"


def test_an_api_that_is_not_started_ignores_signals_and_does_not_answer() -> None:
    process = ApiProcess(Settings(port=free_port()))
    process.send(signal.SIGTERM)
    process.kill()

    assert process.poll() is None
    with pytest.raises(CheckError, match="does not answer"):
        process.check()


def test_the_api_works_if_it_answers(tmp_path: Path) -> None:
    path = tmp_path / "nereid-1.sock"
    with scripted(200) as server, scripted(200, path=path):
        ApiProcess(Settings(port=int(server.url.rpartition(":")[2]))).check()
        ApiProcess(Settings(port=free_port()), path).check()
    with scripted(503) as server, pytest.raises(CheckError):
        ApiProcess(Settings(port=int(server.url.rpartition(":")[2]))).check()


def test_the_api_is_asked_whether_its_model_is_ready_until_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path, monkeypatch, f"touch {notes(tmp_path)}; exec sleep 60") as process:
        with scripted(200, 503, 503, 200, path=tmp_path / "nereid-1.sock") as server:
            for is_ready in (False, False, True, True):
                process.check()
                assert process.is_model_ready is is_ready
        asked = [request.split()[1] for request in server.asked]
    assert asked == [b"/livez", b"/readyz", b"/readyz", b"/readyz"]


def test_the_api_does_not_work_without_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers may answer although their parent hangs."""
    script = f'echo "$NEREID_INTERNAL_BEATS_FD" > {tmp_path}/written; mv {tmp_path}/written {notes(tmp_path)}; exec sleep 60'
    with running(tmp_path, monkeypatch, script) as process:
        beats = int(notes(tmp_path).read_text(encoding="utf-8"))
        with scripted(200, path=tmp_path / "nereid-1.sock"):
            process.check()
        for _ in range(2):
            for _ in range(4):
                process.check()
            os.eventfd_write(beats, 1)
            process.check()
        for _ in range(4):
            process.check()
        with pytest.raises(CheckError, match="its main process does not respond") as caught:
            process.check()
        assert caught.value.is_final

        process.kill()
        process.spawn()
        with pytest.raises(CheckError, match="it does not answer"):
            process.check()


def test_an_instance_is_named_by_its_socket() -> None:
    assert ApiProcess(Settings()).name == "the API"
    assert ApiProcess(Settings(), Path("/run/nereid-2.sock")).name == "instance nereid-2.sock"


def test_the_api_inherits_the_table_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"""
    cd /proc/self/fd
    inherited=$(readlink $NEREID_INTERNAL_WORKER_TABLE_FD $NEREID_INTERNAL_LAST_VALID_FD)
    cd {tmp_path}
    echo "$NEREID_SOCKET $NEREID_WORKERS $inherited" > written
    mv written notes
    exec sleep 60"""
    with running(tmp_path, monkeypatch, script):
        path, workers, inherited = notes(tmp_path).read_text(encoding="utf-8").split(maxsplit=2)

    assert (path, workers) == (str(tmp_path / "nereid-1.sock"), "3")
    assert "nereid-workers" in inherited
    assert "nereid-last-valid" in inherited


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_api_ends_in_its_own_time_after_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    name = number.name.removeprefix("SIG")
    script = f"trap 'exit 7' {name}; touch {notes(tmp_path)}; {LIVE}"
    with running(tmp_path, monkeypatch, script) as process:
        assert process.is_running
        process.send(number)
        wait_for(lambda: not process.is_running)

        assert process.poll() == 7


def test_a_killed_api_leaves_nothing_and_can_be_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    script = f"trap '' TERM; ({LIVE}) & touch {notes(tmp_path)}; {LIVE}"
    with running(tmp_path, monkeypatch, script) as process:
        (tmp_path / "nereid-1.sock").touch()
        process.send(signal.SIGTERM)
        process.kill()
        wait_until_gone(children() - before)
        assert not process.is_running
        assert not (tmp_path / "nereid-1.sock").exists()

        process.spawn()
        assert process.is_running


def test_an_api_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))

    with pytest.raises(CommandError, match="No such file"):
        ApiProcess(Settings()).spawn()


def test_the_api_ends_with_the_process_that_has_started_it(tmp_path: Path) -> None:
    """The kernel signals it, so that it can clean up."""
    script = f"trap 'echo told >> {notes(tmp_path)}; exit' TERM; touch {notes(tmp_path)}; {LIVE}"
    program = written(tmp_path, script)
    code = f"""
import signal, sys
from app.settings.schema import Settings
from app.embedded.api_process import ApiProcess
sys.executable = {str(program)!r}
ApiProcess(Settings()).spawn()
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as parent:
        wait_for(notes(tmp_path).exists)
        parent.kill()

    wait_for(lambda: notes(tmp_path).read_text(encoding="utf-8") == "told\n")
