"""The routes file: what it may contain, how it is followed while others change it, and how it is written."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from app.resilience import last_valid
from app.routing import routes as module
from app.routing.route import Canary, Route, Shadow
from app.routing.routes import Routes, RoutesError
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture
from tests.support import Clock

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
