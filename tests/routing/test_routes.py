"""The routes file, which others change meanwhile and which is written, and the table of `nereid compare`."""

import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from app.host.program import CommandError
from app.resilience import last_valid
from app.resilience.worker_table import WorkerTable
from app.routing import routes as module
from app.routing.report import report
from app.routing.route import Canary, Route, Shadow
from app.routing.routes import Routes, RoutesError
from app.telemetry.metrics import Metrics, render
from tests.fakes import http
from tests.fakes.clock import Clock
from tests.fakes.http import scripted
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture

ROUTES_TEXT = """
[detector]
to = "yolo11n:2"
canary = {to = "yolo11n:3", share = 0.05}
shadow = {to = "big", share = 0.1}
fallback = "yolo11n:1"

["v1.doors"]
to = "doors"
"""
CANARY = Canary("yolo11n:3", 0.05)
DETECTOR = Route("yolo11n:2", CANARY, Shadow("big", 0.1), "yolo11n:1")
SIMPLE = Route("yolo11n")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "routes.toml"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, "app.resilience.last_valid")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[detector", "is not valid: Expected ']'"),
        ('["a route"]\nto = "tiny"', "matching regex"),
        ('[detector]\nto = "tiny"\nweight = 1', "unknown field `weight`"),
        ('[detector]\nto = "tiny"\ncanary = {to = "new", share = 1.5}', "Expected `float` <= 1.0"),
        ('[detector]\nto = "tiny"\ncanary = {to = "new", share = nan}', "Expected `float`"),
        ('[a]\nto = "tiny"\nfallback = "a"', "[a] fallback: a is a route, not a model"),
    ],
)
def test_file_that_is_not_valid_is_refused(path: Path, text: str, said: str) -> None:
    path.write_text(text)
    with pytest.raises(RoutesError) as refused:
        Routes(path)

    assert str(refused.value).startswith(f"{path} is not valid: ")
    assert said in str(refused.value)


def spoil(path: Path) -> None:
    path.write_text("[detector")


def truncate(path: Path) -> None:
    path.write_text("")


@pytest.mark.parametrize("damage", [spoil, truncate, Path.unlink])
def test_damaged_file_changes_nothing(path: Path, clock: Clock, damage: Callable[[Path], None]) -> None:
    path.write_text(ROUTES_TEXT)
    routes = Routes(path)
    damage(path)
    clock.now += 1
    assert routes.known == Routes(path).known == {"detector": DETECTOR, "v1.doors": Route("doors")}
    assert "routes" in last_valid.refused
    with pytest.raises(RoutesError):
        routes.put("detector", SIMPLE)
    path.write_text(ROUTES_TEXT.replace("0.05", "0.5"))
    clock.now += 1

    assert routes.known["detector"].canary == Canary("yolo11n:3", 0.5)
    assert last_valid.refused == {}


@pytest.mark.parametrize("content", [None, ""])
def test_change_is_seen_at_once_where_it_is_made_and_by_others_within_a_second(
    path: Path, clock: Clock, content: str | None
) -> None:
    """A new file, which may be empty, has no routes."""
    if content is not None:
        path.write_text(content)
    one, other = Routes(path), Routes(path)
    assert one.known == other.known == {}
    one.put("detector", DETECTOR)
    assert one.known == {"detector": DETECTOR}
    clock.now += 1
    assert other.known == {"detector": DETECTOR}
    assert [other.put("detector", None) for _ in range(2)] == [True, False]
    clock.now += 1
    assert one.known == other.known == {}


def test_canary_is_withdrawn_for_a_reason_unless_it_was_changed(path: Path) -> None:
    routes, reason = Routes(path), 'says "no"\\ é 50 %'
    routes.put("detector", DETECTOR)
    routes.put("v1.doors", SIMPLE)
    routes.withdraw("detector", Canary("yolo11n:4", 0.05), "it was put before")
    for name in ("detector", "v1.doors", "removed"):
        routes.withdraw(name, CANARY, reason)

    withdrawn = Route("yolo11n:2", Canary("yolo11n:3", 0.05, withdrawn=reason), DETECTOR.shadow, "yolo11n:1")
    assert Routes(path).known == {"detector": withdrawn, "v1.doors": SIMPLE}


def test_writers_lose_no_change_of_each_other_and_readers_see_whole_files(path: Path) -> None:
    Routes(path).put("first", SIMPLE)
    are_done, seen = threading.Event(), set()

    def write(routes: Routes, worker: int) -> None:
        for number in range(5):
            routes.put(f"route-{worker}-{number}", DETECTOR)

    def read() -> None:
        while not are_done.is_set():
            seen.add(len(module.load(path)))

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(Routes(path), worker)) for worker in range(4)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    are_done.set()
    reader.join()

    assert len(Routes(path).known) == 21
    assert "routes" not in last_valid.refused
    assert 0 not in seen


def test_file_behind_a_link_is_written_with_its_mode_whatever_a_killed_writer_has_left(path: Path) -> None:
    real = path.parent / "real.toml"
    real.write_text(ROUTES_TEXT)
    real.chmod(0o640)
    path.symlink_to(real)
    (path.parent / f".{real.name}.unfinished").write_text("[half")
    Routes(path).put("detector", SIMPLE)

    assert path.is_symlink()
    assert module.load(real) == {"detector": SIMPLE, "v1.doors": Route("doors")}
    assert real.stat().st_mode & 0o777 == 0o640
    assert {each.name for each in path.parent.iterdir()} == {path.name, real.name}


PAIR = "door", "big:1", "tiny:2"
TABLE = """\
door: big:1 (25.0 ms) compared with tiny:2 (10.0 ms), 2 images
class  boxes  agreement  missing  additional  mean IoU   score
all        5      50.0%        2           1     0.800  +0.100
cat        4      75.0%        1           0     0.800  +0.100
dog        1       0.0%        1           1         -       -
images for big: 2 compared, 3 dropped, 0 failed"""


@pytest.fixture
def text(table: WorkerTable) -> bytes:
    metrics = Metrics(table, "1")
    for label, matched, missing, additional in (("cat", 3, 1, 0), ("dog", 0, 1, 1)):
        for result, number in (("matched", matched), ("missing", missing), ("additional", additional)):
            metrics.shadow_boxes.add(number, *PAIR, label, result)
    for _ in range(3):
        metrics.shadow_iou.observe(0.8, *PAIR, "cat")
        metrics.shadow_score.observe(0.5, *PAIR, "cat", "given")
        metrics.shadow_score.observe(0.6, *PAIR, "cat", "shadow")
    for given, shadow in ((0.005, 0.02), (0.015, 0.03)):
        metrics.shadow_seconds.observe(given, *PAIR, "given")
        metrics.shadow_seconds.observe(shadow, *PAIR, "shadow")
    metrics.shadow_images.add(2, "door", "big", "compared")
    metrics.shadow_images.add(3, "door", "big", "dropped")
    metrics.route_requests.add(1, "door", "tiny:2", "default", "200")
    metrics.shadow_images.add(9, "gate", "big", "failed")
    return render(metrics.collect(), "")[0]


def test_table_has_a_row_for_each_class_and_for_all(text: bytes) -> None:
    with http.answering(text) as url:
        assert report(url, [None], "door", None) == TABLE
        assert report(url, [None], "gate", None) == "images for big: 0 compared, 0 dropped, 9 failed"
        with pytest.raises(CommandError, match="no image of a route hall"):
            report(url, [None], "hall", None)


@pytest.mark.parametrize(("status", "is_socket"), [(401, False), (403, True)])
def test_key_comes_from_a_file(tmp_path: Path, status: int, *, is_socket: bool) -> None:
    file, path = tmp_path / "secret", tmp_path / "api.sock" if is_socket else None
    file.write_text("ops.secret\n", encoding="utf-8")
    with scripted(status, path=path) as server, pytest.raises(CommandError, match="--key-file"):
        report("http://127.0.0.1:1" if is_socket else server.url, [path], "door", file)

    assert re.search(rb"GET /metrics .*X-API-Key: ops.secret\r\n", server.asked[0], re.DOTALL)
