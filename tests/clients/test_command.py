"""The command `nereid-client detect`: result files that a later run continues, and exit codes."""

import csv
import json
import resource
import signal
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from nereid_client import AsyncClient, Retries
from nereid_client.command import main
from tests.clients.conftest import detected, refused

RED = ("red", 0, 0.9, (20.0, 30.0, 80.0, 90.0))
PARAMETERS = {"confidence": "0.4", "model": "doors", "boxes": "pixel"}
NAMES = ["a.jpg", "b.png", "deeper/c.jpg"]


class Gateway:
    """Responds to each request as a test says, by its content; by default with a red object."""

    def __init__(self) -> None:
        self.asked: list[httpx.Request] = []
        self.respond: Callable[[str], httpx.Response] = lambda _: detected(RED)

    @property
    def bodies(self) -> list[str]:
        """What was sent since the last time."""
        bodies = sorted(request.content.decode() for request in self.asked)
        self.asked.clear()
        return bodies

    async def handle(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        self.asked.append(request)
        return self.respond(request.content.decode())


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Gateway:
    made = Gateway()

    def client(*arguments: Any, **options: Any) -> AsyncClient:  # noqa: ANN401
        return AsyncClient(*arguments, **{**options, "transport": httpx.MockTransport(made.handle), "retries": Retries(attempts=1)})

    monkeypatch.setattr("nereid_client.command.AsyncClient", client)
    return made


@pytest.fixture(autouse=True)
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the current one with three pictures, whose content is their name, and a file that is none."""
    monkeypatch.chdir(tmp_path)
    folder = Path("photos")
    (folder / "deeper").mkdir(parents=True)
    for name in (*NAMES, "notes.txt"):
        (folder / name).write_text(name)
    return folder


def detect(*arguments: str) -> object:
    """Return the exit code."""
    try:
        return main(["detect", *arguments])
    except SystemExit as exited:
        return exited.code


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def drawn(_: str) -> httpx.Response:
    return detected(RED, visualization=b64encode(b"drawn").decode())


def test_each_picture_of_a_folder_has_one_line(gateway: Gateway, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["photos", "photos/deeper", "--out", "r.jsonl", "--confidence", "0.4", "--model", "doors"]
    assert detect(*arguments) == 0
    assert capsys.readouterr().err == "pictures: 3, new: 3, with a result: 3\n"
    assert dict(gateway.asked[0].url.params) == {**PARAMETERS, "format": "json"}
    assert gateway.bodies == NAMES
    (photos / "caf\udce9\n.png").write_text("latin-1")  # bytes that are not UTF-8
    assert detect(*arguments) == 0
    assert gateway.bodies == ["latin-1"]

    found = lines("r.jsonl")
    assert sorted(line["file"] for line in found) == [*NAMES[:2], "caf\\udce9\n.png", NAMES[2]]
    assert found[0]["image"] == {"width": 200, "height": 100}
    assert [detection["class_name"] for detection in found[0]["detections"]] == ["red"]
    assert found[0]["parameters"] == PARAMETERS


def test_failure_is_listed_and_tried_again(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.respond = lambda name: refused(422, "invalid_image") if name == "b.png" else detected(RED)
    assert detect("photos", "--out", "r.jsonl") == 1
    assert capsys.readouterr().err == (
        "b.png: 422 invalid_image: not now (request 7)\npictures: 3, new: 3, with a result: 2; the next run sends the others\n"
    )
    gateway.respond = lambda _: detected()
    assert gateway.bodies == NAMES
    assert detect("photos", "--out", "r.jsonl") == 0

    assert gateway.bodies == ["b.png"]
    assert sorted(line["file"] for line in lines("r.jsonl")) == NAMES


def test_interrupted_run_is_continued(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(name: str) -> httpx.Response:
        if name == "b.png":
            signal.raise_signal(signal.SIGINT)
        return detected(RED)

    gateway.respond = interrupt
    assert detect("photos", "--out", "r.jsonl", "--in-flight", "1") == 130
    done = [line["file"] for line in lines("r.jsonl")]
    assert "deeper/c.jpg" not in done
    assert capsys.readouterr().err == f"pictures: 3, new: 3, with a result: {len(done)}; the next run sends the others\n"
    gateway.respond = lambda _: detected(RED)
    gateway.asked.clear()
    assert detect("photos", "--out", "r.jsonl") == 0

    assert gateway.bodies == NAMES[len(done) :]
    assert sorted(line["file"] for line in lines("r.jsonl")) == NAMES


@pytest.mark.parametrize(
    ("response", "options", "message"),
    [
        (refused(401, "unauthorized"), [], "401 unauthorized: not now (request 7)"),
        (refused(503, "circuit_open"), [], "503 circuit_open: not now (request 7)"),
        (httpx.Response(200, text="Welcome"), [], "http://127.0.0.1:4603/ does not respond as"),
        (drawn(""), ["--drawn", "photos/a.jpg/drawn"], "[Errno "),
    ],
)
def test_run_stops_at_what_all_pictures_would_get(
    gateway: Gateway, capsys: pytest.CaptureFixture[str], response: httpx.Response, options: list[str], message: str
) -> None:
    gateway.respond = lambda _: response

    assert detect("photos", "--out", "r.jsonl", "--in-flight", "1", *options) == 1
    assert capsys.readouterr().err.startswith(f"stopped: {message}")
    assert Path("r.jsonl").read_bytes() == b""
    assert len(gateway.asked) == 1


def test_line_that_a_killed_run_left_incomplete_is_written_anew(gateway: Gateway) -> None:
    arguments = ["photos/a.jpg", "photos/b.png", "--out", "r.jsonl"]
    detect(*arguments)
    first, second = Path("r.jsonl").read_bytes().splitlines(keepends=True)
    Path("r.jsonl").write_bytes(first + second[:50])
    gateway.asked.clear()

    assert detect(*arguments) == 0
    assert gateway.bodies == [json.loads(second)["file"]]
    assert Path("r.jsonl").read_bytes() == first + second


def test_full_disk_stops_the_run(gateway: Gateway) -> None:
    gateway.respond = lambda _: detected(RED, RED, RED)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
    try:
        assert detect("photos/a.jpg", "--out", "r.jsonl") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(Path("r.jsonl").read_bytes()) == 300

    assert detect("photos/a.jpg", "--out", "r.jsonl") == 0
    assert [line["file"] for line in lines("r.jsonl")] == ["a.jpg"]
    assert len(gateway.asked) == 2


def test_lines_go_to_stdout_without_a_file(
    gateway: Gateway, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEREID_KEY", "camera.secret")
    assert detect("photos/a.jpg", "--url", "http://gateway:1") == 0

    written = capfdbinary.readouterr()
    assert (json.loads(written.out)["file"], written.err) == ("a.jpg", b"")
    assert (gateway.asked[0].headers["authorization"], gateway.asked[0].url.host) == ("Bearer camera.secret", "gateway")


def test_csv_and_coco_have_an_entry_per_detection(gateway: Gateway) -> None:
    gateway.respond = lambda name: detected(RED) if name == "b.png" else detected()

    assert detect("photos", "--out", "results.csv", "--boxes", "normalized") == 0
    assert [*csv.reader(Path("results.csv").read_text().splitlines())] == [
        ["file", "class_id", "class_name", "confidence", "x1", "y1", "x2", "y2"],
        ["b.png", "0", "red", "0.9", "20.0", "30.0", "80.0", "90.0"],
    ]
    assert gateway.asked[0].url.params["boxes"] == "normalized"
    gateway.asked.clear()
    assert detect("photos", "--out", "results.json", "--in-flight", "1", "--boxes", "normalized") == 0
    assert gateway.asked[0].url.params["boxes"] == "pixel"
    box = {"bbox": [20, 30, 60, 60], "area": 3600, "iscrowd": 0, "score": 0.9}
    assert json.loads(Path("results.json").read_text()) == {
        "images": [{"id": number, "file_name": name, "width": 200, "height": 100} for number, name in enumerate(NAMES, 1)],
        "annotations": [{"id": 1, "image_id": 2, "category_id": 0, **box}],
        "categories": [{"id": 0, "name": "red"}],
    }


def test_yolo_is_a_folder_of_labels(gateway: Gateway, photos: Path) -> None:
    answers = {"b.png": ("red", 0, 0.9, (0.1, 0.3, 0.4, 0.9)), "d.jpg": ("blue", 2, 0.55, (0.6, 0.1, 0.9, 0.6))}
    gateway.respond = lambda name: detected(answers[name]) if name in answers else detected()
    for new in ("a.jpg", "d.jpg"):
        (photos / new).write_text(new)
        assert detect("photos", "--out", "labels", "--save-conf") == 0

    assert gateway.asked[0].url.params["boxes"] == "normalized"
    written = {path.name: path.read_text() for path in Path("labels").rglob("*.txt")}
    assert written["b.txt"] == "0 0.250000 0.600000 0.300000 0.600000 0.9\n"
    assert written["d.txt"].startswith("2 0.750000 0.350000 0.300000 0.500000")
    assert (written["a.txt"], written["c.txt"], written["classes.txt"]) == ("", "", "red\n1\nblue\n")
    assert (Path("labels") / "deeper" / "c.txt").exists()


def test_drawn_pictures_are_kept_and_not_sent(gateway: Gateway, photos: Path) -> None:
    """Even if their folder is in that of the pictures; they never replace originals, also under another name of the folder."""
    gateway.respond = drawn
    for _ in range(2):
        assert detect("photos", "--out", "r.jsonl", "--drawn", "photos/drawn") == 0

    kept = {path.relative_to(photos / "drawn").as_posix(): path.read_bytes() for path in (photos / "drawn").rglob("*.jpg")}
    assert kept == dict.fromkeys(("a.jpg", "b.jpg", "deeper/c.jpg"), b"drawn")
    assert gateway.asked[0].url.params["format"] == "image_and_json"
    assert len(gateway.asked) == 3
    Path("link").symlink_to("photos")
    assert detect("photos", "--drawn", "link") == 2
    assert len(gateway.asked) == 3


def test_text_of_a_response_does_not_control_the_terminal(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.respond = lambda _: httpx.Response(415, json={"detail": "\x1b[2Jnot ä\npicture"})
    detect("photos/a.jpg")

    assert capsys.readouterr().err == "a.jpg: 415: \\x1b[2Jnot ä\\npicture\n"


def test_result_file_names_only_pictures_in_the_folder(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    """A YOLO folder that somebody else has made must not make the command write elsewhere."""
    detect("photos", "--out", "labels", "--in-flight", "1")
    journal = Path("labels", "results.jsonl")
    journal.write_text(journal.read_text().replace('"a.jpg"', '"../../escaped.jpg"'))
    gateway.asked.clear()

    assert detect("photos", "--out", "labels") == 2
    assert "line 1: '../../escaped.jpg' is outside of the folder" in capsys.readouterr().err
    assert gateway.asked == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("photos --out results.xml", "results.xml: use --format, or one of the suffixes .jsonl, .csv and .json, or none"),
        ("photos other", "photos/a.jpg and other/a.jpg would both be a.jpg in the results; rename one"),
        ("other --out labels", "other/a.jpg and other/a.png would both be a in the results; rename one"),
        ("photos --out made.jsonl --confidence 0.7", "made.jsonl has results with other parameters, {'confidence': '0.5'"),
        ("photos --out photos/notes.txt --format jsonl", "photos/notes.txt is not a result file: line 1: "),
        ("photos --out photos/a.jpg --format coco", "photos/a.jpg exists and was not made by this command"),
        ("other/a.png --drawn other", "there are no pictures"),
        ("photos --out photos/a.jpg/results.jsonl", "File exists: 'photos/a.jpg'"),
        ("photos --prepare 0:85", "0 is less than 1"),
        ("photos --url http://gateway:port", "Invalid port: 'port'"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_sent(
    gateway: Gateway, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    Path("other").mkdir()
    for name in ("other/a.jpg", "other/a.png"):
        Path(name).write_text(name)
    detect("photos", "--out", "made.jsonl", "--confidence", "0.5")
    gateway.asked.clear()
    before = {path: path.read_bytes() for path in Path.cwd().rglob("*.*")}

    assert detect(*arguments.split()) == 2
    assert message in capsys.readouterr().err
    assert gateway.asked == []
    assert {path: path.read_bytes() for path in Path.cwd().rglob("*.*")} == before
