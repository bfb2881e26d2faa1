"""The command `nereid-client detect`: result files that a later run continues, and exit codes."""

import csv
import json
import resource
from base64 import b64encode
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest

from nereid_client import AsyncClient, Retries
from nereid_client.command import main
from tests.clients.responses import detected, refused

RED = ("red", 0, 0.9, (20.0, 30.0, 80.0, 90.0))
BLUE = ("blue", 2, 0.55, (120.0, 10.0, 180.0, 60.0))


class Gateway:
    """Responds to each request as a test says; by default with a red and a blue object."""

    def __init__(self) -> None:
        self.asked: list[httpx.Request] = []
        self.respond: Callable[[httpx.Request], httpx.Response] = lambda _: detected(RED, BLUE)

    @property
    def bodies(self) -> list[str]:
        """What was sent since the last time."""
        bodies = sorted(request.content.decode() for request in self.asked)
        self.asked.clear()
        return bodies

    async def handle(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        self.asked.append(request)
        return self.respond(request)


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Gateway:
    made = Gateway()

    def client(*arguments: Any, **options: Any) -> AsyncClient:  # noqa: ANN401
        return AsyncClient(*arguments, **{**options, "transport": httpx.MockTransport(made.handle), "retries": Retries(attempts=1)})

    monkeypatch.setattr("nereid_client.command.AsyncClient", client)
    return made


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with a.jpg, b.png and deeper/c.jpg, whose content is their name, and a file that is no picture."""
    folder = tmp_path / "photos"
    (folder / "deeper").mkdir(parents=True)
    for name in ("a.jpg", "b.png", "deeper/c.jpg", "notes.txt"):
        (folder / name).write_text(name)
    return folder


@pytest.fixture
def workspace(photos: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a second folder of pictures."""
    monkeypatch.chdir(photos.parent)
    Path("other").mkdir()
    for name in ("a.jpg", "a.png"):
        Path("other", name).write_text(name)
    Path("classes.bmp").write_text("classes.bmp")
    return photos.parent


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def drawn_response() -> httpx.Response:
    return httpx.Response(200, json={**detected(RED).json(), "visualization": b64encode(b"drawn").decode()})


def refuse_b(status: int, code: str) -> Callable[[httpx.Request], httpx.Response]:
    return lambda request: refused(status, code) if request.content == b"b.png" else detected(RED)


def test_each_picture_of_a_folder_has_one_line(gateway: Gateway, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = photos.parent / "results.jsonl"
    assert main(["detect", str(photos), "--out", str(out), "--confidence", "0.4", "--model", "doors"]) == 0
    assert capsys.readouterr().err == "pictures: 3, new: 3, with a result: 3\n"
    query = gateway.asked[0].url.params
    assert (query["confidence"], query["model"], query["boxes"], query["format"]) == ("0.4", "doors", "pixel", "json")
    assert gateway.bodies == ["a.jpg", "b.png", "deeper/c.jpg"]
    (photos / "d.webp").write_text("d.webp")
    assert main(["detect", str(photos), "--out", str(out), "--confidence", "0.4", "--model", "doors"]) == 0
    assert gateway.bodies == ["d.webp"]

    found = lines(out)
    assert sorted(line["file"] for line in found) == ["a.jpg", "b.png", "d.webp", "deeper/c.jpg"]
    assert found[0]["image"] == {"width": 200, "height": 100}
    assert [detection["class_name"] for detection in found[0]["detections"]] == ["red", "blue"]
    assert found[0]["parameters"] == {"confidence": "0.4", "model": "doors", "boxes": "pixel"}


def test_a_failure_is_listed_and_tried_again(gateway: Gateway, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = photos.parent / "results.jsonl"
    gateway.respond = refuse_b(422, "invalid_image")
    assert main(["detect", str(photos), "--out", str(out)]) == 1
    assert capsys.readouterr().err == (
        "b.png: 422 invalid_image: not now (request 7)\npictures: 3, new: 3, with a result: 2; the next run sends the others\n"
    )
    gateway.respond = lambda _: detected()
    assert gateway.bodies == ["a.jpg", "b.png", "deeper/c.jpg"]
    assert main(["detect", str(photos), "--out", str(out)]) == 0

    assert gateway.bodies == ["b.png"]
    assert sorted(line["file"] for line in lines(out)) == ["a.jpg", "b.png", "deeper/c.jpg"]


@pytest.mark.parametrize(
    ("status", "code"), [(401, "unauthorized"), (404, "unknown_model"), (400, "wrong_task"), (503, "circuit_open")]
)
def test_a_refusal_that_all_pictures_would_get_stops_the_run(
    gateway: Gateway, photos: Path, capsys: pytest.CaptureFixture[str], status: int, code: str
) -> None:
    gateway.respond = lambda _: refused(status, code)

    assert main(["detect", str(photos), "--in-flight", "1"]) == 1
    assert capsys.readouterr().err == f"stopped: {status} {code}: not now (request 7)\n"
    assert len(gateway.asked) == 1


@pytest.mark.parametrize(
    ("response", "drawn", "message"),
    [
        (httpx.Response(200, text="Welcome"), [], "stopped: http://127.0.0.1:4603/ does not respond as"),
        (drawn_response(), ["--drawn", "photos/a.jpg/drawn"], "stopped: [Errno "),
    ],
    ids=["no gateway", "no folder"],
)
def test_a_run_that_cannot_go_on_stops(  # noqa: PLR0913, PLR0917 - fixtures
    gateway: Gateway, workspace: Path, capsys: pytest.CaptureFixture[str], response: httpx.Response, drawn: list[str], message: str
) -> None:
    gateway.respond = lambda _: response

    assert main(["detect", "photos", "--out", "results.jsonl", "--in-flight", "1", *drawn]) == 1
    assert capsys.readouterr().err.startswith(message)
    assert (workspace / "results.jsonl").read_bytes() == b""
    assert len(gateway.asked) == 1


def test_a_line_that_a_killed_run_left_incomplete_is_written_anew(gateway: Gateway, photos: Path) -> None:
    out = photos.parent / "results.jsonl"
    main(["detect", str(photos / "a.jpg"), str(photos / "b.png"), "--out", str(out)])
    first, second = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(first + second[:50])
    gateway.asked.clear()

    assert main(["detect", str(photos / "a.jpg"), str(photos / "b.png"), "--out", str(out)]) == 0
    assert gateway.bodies == [json.loads(second)["file"]]
    assert out.read_bytes() == first + second


def test_without_a_file_lines_go_to_stdout(gateway: Gateway, photos: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["detect", str(photos / "a.jpg")]) == 0

    written = capfdbinary.readouterr()
    assert json.loads(written.out)["file"] == "a.jpg"
    assert written.err == b""
    assert gateway.bodies == ["a.jpg"]


@pytest.mark.parametrize("boxes", ["pixel", "normalized"])
def test_csv_has_a_row_per_detection(gateway: Gateway, photos: Path, boxes: str) -> None:
    out = photos.parent / "results.csv"
    gateway.respond = lambda request: detected(RED) if request.content == b"a.jpg" else detected()

    assert main(["detect", str(photos), "--out", str(out), "--boxes", boxes]) == 0
    assert [*csv.reader(out.read_text().splitlines())] == [
        ["file", "class_id", "class_name", "confidence", "x1", "y1", "x2", "y2"],
        ["a.jpg", "0", "red", "0.9", "20.0", "30.0", "80.0", "90.0"],
    ]
    assert gateway.asked[0].url.params["boxes"] == boxes


def test_coco_is_a_dataset_whose_annotations_are_results(gateway: Gateway, photos: Path) -> None:
    out = photos.parent / "results.json"
    gateway.respond = lambda request: detected(RED) if request.content == b"b.png" else detected()

    assert main(["detect", str(photos), "--out", str(out), "--in-flight", "1", "--boxes", "normalized"]) == 0
    assert gateway.asked[0].url.params["boxes"] == "pixel"
    box = {"bbox": [20, 30, 60, 60], "area": 3600, "iscrowd": 0, "score": 0.9}
    assert json.loads(out.read_text()) == {
        "images": [
            {"id": number, "file_name": name, "width": 200, "height": 100}
            for number, name in enumerate(("a.jpg", "b.png", "deeper/c.jpg"), 1)
        ],
        "annotations": [{"id": 1, "image_id": 2, "category_id": 0, **box}],
        "categories": [{"id": 0, "name": "red"}],
    }


@pytest.mark.parametrize(("options", "confidence"), [([], ""), (["--save-conf"], " 0.9")])
def test_yolo_is_a_folder_of_labels(gateway: Gateway, photos: Path, options: list[str], confidence: str) -> None:
    out = photos.parent / "labels"
    red, blue = (*RED[:3], (0.1, 0.3, 0.4, 0.9)), (*BLUE[:3], (0.6, 0.1, 0.9, 0.6))
    answers = {b"b.png": detected(red), b"d.jpg": detected(blue)}
    gateway.respond = lambda request: answers.get(request.content) or detected()
    for new in ("a.jpg", "d.jpg"):
        (photos / new).write_text(new)
        assert main(["detect", str(photos), "--out", str(out), *options]) == 0

    assert gateway.asked[0].url.params["boxes"] == "normalized"
    assert (out / "b.txt").read_text() == f"0 0.250000 0.600000 0.300000 0.600000{confidence}\n"
    assert (out / "a.txt").read_text() == (out / "deeper" / "c.txt").read_text() == ""
    assert (out / "d.txt").read_text().startswith("2 0.750000 0.350000 0.300000 0.500000")
    assert (out / "classes.txt").read_text() == "red\n1\nblue\n"


def test_drawn_pictures_are_kept_and_not_sent(gateway: Gateway, photos: Path) -> None:
    """Even if their folder is in that of the pictures."""
    gateway.respond = lambda _: drawn_response()
    arguments = ["detect", str(photos), "--out", str(photos.parent / "r.jsonl"), "--drawn", str(photos / "drawn")]
    assert main(arguments) == main(arguments) == 0

    drawn = {path.relative_to(photos / "drawn").as_posix(): path.read_bytes() for path in (photos / "drawn").rglob("*.jpg")}
    assert drawn == dict.fromkeys(("a.jpg", "b.jpg", "deeper/c.jpg"), b"drawn")
    assert gateway.asked[0].url.params["format"] == "image_and_json"
    assert len(gateway.asked) == 3


def test_drawn_pictures_never_replace_originals(gateway: Gateway, photos: Path) -> None:
    """Not even if another name of the folder is given."""
    (photos.parent / "link").symlink_to(photos)

    assert main(["detect", str(photos), "--drawn", str(photos.parent / "link")]) == 2
    assert gateway.asked == []


def test_text_of_a_response_does_not_control_the_terminal(
    gateway: Gateway, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.respond = lambda _: httpx.Response(415, json={"detail": "\x1b[2Jnot ä\npicture"})
    main(["detect", str(photos / "a.jpg")])

    assert capsys.readouterr().err == "a.jpg: 415: \\x1b[2Jnot ä\\npicture\n"


@pytest.mark.parametrize("name", ["../../escaped.jpg", "/escaped.jpg"])
def test_a_result_file_names_only_pictures_in_the_folder(
    gateway: Gateway, photos: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """A YOLO folder that somebody else has made must not make the command write elsewhere."""
    out = photos.parent / "labels"
    arguments = ["detect", str(photos), "--out", str(out), "--in-flight", "1"]
    main(arguments)
    journal = out / "results.jsonl"
    journal.write_text(journal.read_text().replace('"a.jpg"', json.dumps(name)))
    gateway.asked.clear()

    assert main(arguments) == 2
    assert f"line 1: '{name}' is outside of the folder" in capsys.readouterr().err
    assert gateway.asked == []


def test_a_picture_that_is_given_twice_is_sent_once(gateway: Gateway, photos: Path) -> None:
    (photos / "caf\udce9\n.png").write_text("latin-1")  # bytes that are not UTF-8
    out = photos.parent / "results.jsonl"
    assert main(["detect", str(photos), str(photos / "deeper"), "--out", str(out)]) == 0

    assert gateway.bodies == ["a.jpg", "b.png", "deeper/c.jpg", "latin-1"]
    assert sorted(line["file"] for line in lines(out)) == ["a.jpg", "b.png", "caf\\udce9\n.png", "deeper/c.jpg"]


def test_a_full_disk_stops_the_run(gateway: Gateway, photos: Path) -> None:
    out = photos.parent / "results.jsonl"
    arguments = ["detect", str(photos / "a.jpg"), "--out", str(out)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
    try:
        assert main(arguments) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(out.read_bytes()) == 300

    assert main(arguments) == 0
    assert [line["file"] for line in lines(out)] == ["a.jpg"]
    assert len(gateway.asked) == 2


def test_the_key_comes_from_the_environment(gateway: Gateway, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEREID_KEY", "camera.secret")
    main(["detect", str(photos / "a.jpg"), "--url", "http://gateway:1"])

    assert gateway.asked[0].headers["authorization"] == "Bearer camera.secret"
    assert gateway.asked[0].url.host == "gateway"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["photos", "--out", "results.xml"], "results.xml: use --format, or one of the suffixes .jsonl, .csv and .json, or none"),
        (["nowhere"], "nowhere does not exist"),
        (["photos", "other"], "photos/a.jpg and other/a.jpg would both be a.jpg in the results; rename one"),
        (["other", "--out", "labels"], "other/a.jpg and other/a.png would both be a in the results; rename one"),
        (
            ["photos", "--out", "made.jsonl", "--confidence", "0.7"],
            "made.jsonl has results with other parameters, {'confidence': '0.5'",
        ),
        (["photos", "--out", "photos/notes.txt", "--format", "jsonl"], "photos/notes.txt is not a result file: line 1: "),
        (["photos", "--out", "photos/a.jpg", "--format", "jsonl"], "photos/a.jpg is not a result file: line 1: "),
        (["photos", "--out", "photos/a.jpg", "--format", "coco"], "photos/a.jpg exists and was not made by this command"),
        (["photos", "--out", "other", "--format", "yolo"], "other exists and was not made by this command"),
        (["other/a.png", "--drawn", "other"], "there are no pictures"),
        (["photos", "--out", "photos/a.jpg/results.jsonl"], "File exists: 'photos/a.jpg'"),
        (["photos", "--prepare", "large"], "--prepare: invalid"),
        (["photos", "--prepare", "0:85"], "0 is less than 1"),
        (["photos", "--in-flight", "0"], "0 is less than 1"),
        (["photos", "--url", "http://gateway:port"], "Invalid port: 'port'"),
        (["classes.bmp", "--out", "labels"], "classes.txt and classes.bmp would both be classes in the results"),
        (
            ["photos", "--out", "made.jsonl", "--confidence", "0.5", "--drawn", "drawn"],
            "made.jsonl has results with other parameters",
        ),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_sent(
    gateway: Gateway, workspace: Path, arguments: list[str], message: str
) -> None:
    main(["detect", "photos", "--out", "made.jsonl", "--confidence", "0.5"])
    gateway.asked.clear()
    before = {path: path.read_bytes() for path in workspace.rglob("*.*")}
    with redirect_stderr(StringIO()) as said:
        try:
            code: object = main(["detect", *arguments])
        except SystemExit as exited:
            code = exited.code

    assert code == 2
    assert message in said.getvalue()
    assert gateway.asked == []
    assert {path: path.read_bytes() for path in workspace.rglob("*.*")} == before
