"""The health check of a container: its answer, its exit code, and what it loads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from app import entry, healthcheck
from app.settings.schema import PREFIX, Settings
from tests.fakes.http import listening_on, scripted
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture
from tests.support import ROOT


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(PREFIX):
            monkeypatch.delenv(name)


def test_api_lives_if_it_answers_200() -> None:
    """Whether or not it is ready; another program may listen on the port."""
    with scripted(200, 404) as server:
        settings = Settings(port=int(server.url.rpartition(":")[2]))
        assert healthcheck.failure(settings) == ""
        assert healthcheck.failure(settings) == f"{server.url} answers 404"
    assert server.asked[0].startswith(b"GET /livez ")
    assert healthcheck.failure(settings) == f"{server.url} does not answer"


def test_all_instances_must_live(tmp_path: Path) -> None:
    """A crash leaves a socket behind that accepts nothing."""
    settings = Settings(instances=2, socket=str(tmp_path))
    first, second = settings.sockets
    assert second
    listening_on(second).close()
    with scripted(path=first):
        assert healthcheck.failure(settings) == f"{second} does not answer"
        second.unlink()
        with scripted(path=second):
            assert healthcheck.failure(settings) == ""


@pytest.mark.parametrize("command", ["from app.entry import main; code = main()", "from app.__main__ import main; code = main()"])
def test_program_exits_with_0_or_1_and_loads_almost_nothing(command: str) -> None:
    """A container runs it every few seconds; `python -m app healthcheck` takes a longer way to it."""
    heavy = {"numpy", "structlog", "httpx", "PIL", "granian", "app.__main__"} if "entry" in command else {"nothing"}
    code = f"import sys; {command}; print(*{heavy} & {{*sys.modules}}); sys.exit(code)"
    with scripted() as server:
        url = server.url
        done = [run(code, url.rpartition(":")[2])]
    done += [run(code, port) for port in (url.rpartition(":")[2], "no number")]
    assert [each.returncode for each in done] == [0, 1, 1]
    assert {each.stdout.strip() for each in done} == {""}
    assert [each.stderr.removeprefix("nereid: ") for each in done[:2]] == ["", f"{url} does not answer\n"]
    assert "NEREID_PORT: " in done[2].stderr


def run(code: str, port: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", code, "healthcheck"]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "NEREID_PORT": port}, capture_output=True, text=True, check=False)


def test_other_commands_go_to_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["nereid", "--help"])
    with pytest.raises(SystemExit):
        entry.main()
    assert "healthcheck" in capsys.readouterr().out
