"""The program that times the steps of one candidate."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.experiments.candidates import __main__ as program


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the first step of the candidate `counted` is called with; its second step fails on anything but the first's result."""
    calls: list[bytes] = []

    def read(data: bytes) -> bytes:
        calls.append(data)
        return b"read " + data

    def check(data: bytes) -> None:
        assert data.startswith(b"read ")

    def steps_of(name: str) -> dict[str, Any]:
        assert name == "counted"
        return {"read": read, "check": check}

    monkeypatch.setattr(program, "steps_of", steps_of)
    return calls


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b", "a"):
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))


def test_steps_run_on_one_image_after_the_other(seen: list[bytes], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After a warm-up with every image, the images take turns, in the order of their names; each step gets the last result."""
    program.main("counted", folder, 0.02, [])
    result = printed(capsys)

    assert result["images"] > 2
    assert list(result) == ["images", "seconds", "milliseconds"]
    assert list(result["milliseconds"]) == ["read", "check", "free"]
    assert seen[:5] == [b"a", b"b", b"a", b"b", b"a"]
    assert len(seen) == 2 + result["images"]
