"""The command `detect` without the client, and without a gateway."""

import sys
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from app.embedded import detect
from app.host.program import CommandError
from app.settings.schema import Settings


def test_detect_tells_why_it_cannot_begin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        detect.run(Settings(), ["photos", "--url", "http://127.0.0.1:1"])  # of another gateway
    assert "unrecognized arguments: --url" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "nereid_client", None)
    with pytest.raises(CommandError, match=r"pip install 'nereid-client\[progress,prepare\]'"):
        detect.run(Settings(), ["photos"])


def test_detect_runs_nothing_from_a_folder_of_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton and its models are programs, which somebody may have put between the pictures."""
    (tmp_path / "model_repository").mkdir()
    (tmp_path / "a.jpg").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    monkeypatch.setenv("NEREID_TRITON_HOME", "/triton")
    code = "import os; print(os.environ['NEREID_MODEL_REPOSITORY'], os.environ['NEREID_TRITON_HOME'])"
    monkeypatch.setattr("app.host.program.command", lambda *_: [sys.executable, "-c", code])

    with pytest.raises(CommandError, match="the gateway did not start: /data/nereid/model_repository /triton"):
        detect.run(Settings(), ["a.jpg"])


def test_interrupt_while_the_gateway_starts_ends_the_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jpg").write_bytes(b"")
    before = set(psutil.Process().children())
    monkeypatch.setattr("app.host.program.command", lambda *_: [sys.executable, "-c", "import signal; signal.pause()"])
    monkeypatch.setattr("app.host.http.get_status", Mock(side_effect=KeyboardInterrupt))

    assert detect.run(Settings(), [str(tmp_path)]) == 130
    assert set(psutil.Process().children()) == before
