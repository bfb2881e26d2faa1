"""Commands run in the process of the tests, which is as before afterwards."""

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.settings.schema import PREFIX
from tests.support import TABLE_VARIABLE


@pytest.fixture(autouse=True)
def restored_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start without settings, and take back what the command did to this process."""
    monkeypatch.setattr("app.telemetry.logging.configure", lambda *_: None)  # it keeps the stdout of the first test
    monkeypatch.setattr("app.telemetry.streams.never_wait", lambda: None)
    monkeypatch.setattr("PIL.__version__", "12.1.1.post0")  # wherever they run, the stock one is a warning
    saved = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    for name in saved:
        if name.startswith(PREFIX):
            del os.environ[name]
    yield
    if TABLE_VARIABLE in os.environ:
        os.close(int(os.environ[TABLE_VARIABLE]))
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
    os.environ.clear()
    os.environ.update(saved)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEREID_MODEL_REPOSITORY", str(tmp_path))
    return tmp_path


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line on stderr; nothing may be on stdout."""
    out, err = capsys.readouterr()
    assert (out, err.startswith("nereid: "), err.count("\n")) == ("", True, 1), err
    return err.removeprefix("nereid: ").rstrip("\n")
