"""The program that times the steps of one candidate."""

import json
from pathlib import Path

import pytest

from bench.experiments.candidates import __main__ as program


def test_steps_run_on_one_image_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[bytes] = []

    def read(data: bytes) -> bytes:
        seen.append(data)
        return b"read " + data

    def check(data: bytes) -> None:
        assert data.startswith(b"read ")

    for name in ("b", "a"):
        (tmp_path / name).write_bytes(name.encode())
    monkeypatch.setattr(program, "steps_of", {"counted": {"read": read, "check": check}}.__getitem__)
    program.main("counted", tmp_path, 0.2, [])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])

    assert result["images"] > 2
    assert list(result) == ["images", "seconds", "milliseconds"]
    assert list(result["milliseconds"]) == ["read", "check", "free"]
    assert seen[:5] == [b"a", b"b", b"a", b"b", b"a"]
    assert len(seen) == 2 + result["images"]
