"""Search while processes are killed or hang: what was acknowledged is there once, nothing by half, and detection goes on."""

import asyncio
import json
import os
import shutil
import signal
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple
from urllib.parse import urlencode

import asyncpg
import numpy as np
import psutil
import pytest
from pgvector.asyncpg import register_vector

from app.settings.schema import Settings
from bench.models.clusters import make_vector
from bench.models.repository import write_embedding
from tests.fakes import models as small_models
from tests.fakes import text_models
from tests.faults import models
from tests.faults.conftest import RecordFigure
from tests.faults.exchange import NO_ANSWER, Answer, Connection, ask, encode
from tests.faults.fleet import Fleet, running_fleet
from tests.faults.meanwhile import meanwhile
from tests.faults.test_resources import NEEDS_MOUNTS
from tests.postgres import database_home
from tests.processes import has_ended
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture

CLIENTS = 8
ACKNOWLEDGED, AWAY = {200, 201}, {NO_ANSWER, 429, 503}
_PATIENCE_SECONDS = 300.0
_DETECTED = 2000
_SIDE = 256
"""Of the input of the simulated model."""


class Kind(NamedTuple):
    """What is asked of each image, and what must then be there of it."""

    options: Mapping[str, str]
    picture: Callable[[int], bytes]
    parts: int
    vectors: int
    lines: int


class Counts(NamedTuple):
    parts: int
    vectors: int
    lines: int


def colour(number: int) -> tuple[int, int, int]:
    return number % 256, number // 256 % 256, number // 65536


def traffic_scene(number: int) -> bytes:
    """Draw a car and a person, each with a face, on a bright background of its own."""
    return small_models.scene("PNG", f"#{255 - number % 16:02x}{255 - number // 16 % 16:02x}ff")


ONLY_VECTORS = Kind(
    {"enable_detection": "false", "enable_faces": "false", "enable_ocr": "false"},
    lambda number: models.solid(*colour(number)),
    *Counts(0, 1, 0),
)
ALL_PARTS = Kind({"detect_near_duplicates": "false"}, traffic_scene, *Counts(4, 5, 1))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with a model of vectors that takes a millisecond, and with a detector."""
    folder = tmp_path_factory.mktemp("models")
    models.write(folder)
    write_embedding(folder, 1)
    return folder


@pytest.fixture(scope="module")
def full_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with small models for all parts of an image; the default one finds a car and a person."""
    folder = tmp_path_factory.mktemp("models")
    small_models.write(folder)
    text_models.write(folder)
    for model in folder.iterdir():  # a Triton that is restarted loads all that there are
        if not model.name.startswith(("person_and_car", "faces", "ocr", "embedding")):
            shutil.rmtree(model)
    return folder


@contextmanager
def searching(repository: Path, folder: Path, **settings: object) -> Iterator[Fleet]:
    """Run `serve --search` with two instances, and a PostgreSQL of its own."""
    with database_home() as home, searching_at(home, repository, folder, (), **settings) as fleet:
        yield fleet


@contextmanager
def searching_at(home: Path, repository: Path, folder: Path, wrapper: Sequence[str], **settings: object) -> Iterator[Fleet]:
    given = {"search": "on", "database_home": home, "timeout_seconds": 10, **settings}
    with running_fleet(repository, folder, settings=given, wrapper=wrapper) as fleet:
        yield fleet
    Settings(database_home=str(home)).database_folder.rmdir()


def url_of(fleet: Fleet) -> str:
    home = fleet.process.environ()["NEREID_DATABASE_HOME"]
    return Settings(database_home=home).search_database


async def becomes(holds: Callable[[], Awaitable[object]]) -> None:
    end = monotonic() + _PATIENCE_SECONDS
    while not await holds():
        assert monotonic() < end
        await asyncio.sleep(0.05)


async def until(holds: Callable[[], object]) -> None:
    await becomes(lambda: asyncio.to_thread(holds))


async def post(socket: Path, path: str, body: bytes = b"", method: str = "POST", **query: object) -> Answer:
    """Ask an instance; a connection that is refused or broken is no answer."""
    headers = {"Content_Type": "image/png"} if body else {}
    try:
        return await ask(f"unix:{socket}", encode(body, f"{path}?{urlencode(query)}", method, **headers))
    except OSError:
        return Answer(NO_ANSWER, {}, b"")


async def get(fleet: Fleet, path: str) -> dict[str, Any]:
    """Ask until there is an answer."""
    end = monotonic() + _PATIENCE_SECONDS
    while (answer := await post(fleet.sockets[0], path, method="GET")).status in AWAY:
        assert monotonic() < end
        await asyncio.sleep(0.2)
    assert answer.status == 200, answer
    return dict(json.loads(answer.body))


class Ingest:
    """Clients that add pictures. Every third one is not sent again after a failure: it must be there in full, or not at all."""

    def __init__(self, fleet: Fleet, kind: Kind, count: int) -> None:
        self._fleet, self._kind = fleet, kind
        self._left = iter(range(count))
        self.acknowledged: set[str] = set()
        self.given_up: set[str] = set()
        self.statuses: Counter[int] = Counter()
        self.is_over = False

    async def run(self) -> None:
        await asyncio.gather(*(self._run_client(number) for number in range(CLIENTS)))
        self.is_over = True

    async def _run_client(self, client: int) -> None:
        for number in self._left:
            image_id, picture = f"image-{number}", self._kind.picture(number)
            while not await self._add(client + number, image_id, picture):
                if number % 3 == 0:
                    self.given_up.add(image_id)
                    break
                await asyncio.sleep(0.2)

    async def _add(self, turn: int, image_id: str, picture: bytes) -> bool:
        sockets = self._fleet.sockets or [Path("/nowhere")]  # for a moment, none listens
        answer = await post(sockets[turn % len(sockets)], "/ingest", picture, image_id=image_id, **self._kind.options)
        self.statuses[answer.status] += 1
        if answer.status in ACKNOWLEDGED:
            assert json.loads(answer.body)["image_id"] == image_id
            self.acknowledged.add(image_id)
            return True
        assert answer.status in AWAY, answer
        return False


async def kill_each(fleet: Fleet, ingest: Ingest, count: int, kills: int, record: RecordFigure) -> None:
    """Kill a worker, the database and Triton in turn, spread over the time in which so many images are added."""
    victims: dict[str, Callable[[], psutil.Process | None]] = {
        "worker": lambda: next(iter(fleet.workers()), None),
        "database": fleet.database,
        "Triton": fleet.triton,
    }
    for place in range(kills * len(victims)):
        share = count * (place + 1) / (kills * len(victims) + 1)
        await until(lambda share=share: len(ingest.acknowledged) > share or ingest.is_over)  # type: ignore[misc]
        name = [*victims][place % len(victims)]
        await until(victims[name])
        victim = victims[name]()
        assert victim is not None
        victim.kill()
        await until(lambda victim=victim: has_ended(victim))  # type: ignore[misc]
        before, killed = len(ingest.acknowledged), monotonic()
        await until(lambda before=before: len(ingest.acknowledged) > before + CLIENTS or ingest.is_over)  # type: ignore[misc]
        record(f"{name} killed: images are added again after, s", monotonic() - killed)


async def stored(url: str) -> dict[str, Counts]:
    """Return what is there of each image; no vector, part or text is there without its image."""
    connection = await asyncpg.connect(url)
    try:
        numbers = [row[0] for row in await connection.fetch("SELECT number FROM models")]
        tables = ["parts", "texts", *(f"vectors_{number}" for number in numbers)]
        for table in tables:
            alone = f"SELECT count(*) FROM {table} r WHERE NOT EXISTS (SELECT FROM images WHERE number = r.image)"  # noqa: S608
            assert await connection.fetchval(alone) == 0
        vectors = " + ".join(f"(SELECT count(*) FROM vectors_{number} v WHERE v.image = i.number)" for number in numbers)  # noqa: S608
        parts = "(SELECT count(*) FROM parts WHERE image = i.number)"
        lines = "(SELECT coalesce(max(jsonb_array_length(lines)), 0) FROM texts WHERE image = i.number)"
        rows = await connection.fetch(f"SELECT image_id, {parts}, {vectors}, {lines} FROM images i")  # noqa: S608
    finally:
        await connection.close()
    found = {row[0]: Counts(*row[1:]) for row in rows}
    assert len(found) == len(rows), "an image is there twice"
    return found


async def vectors_in(url: str) -> dict[str, Any]:
    """Return the vector of each image."""
    connection = await asyncpg.connect(url)
    try:
        await register_vector(connection)
        return dict(await connection.fetch("SELECT image_id, vector FROM vectors_1 JOIN images ON images.number = image"))
    finally:
        await connection.close()


@pytest.mark.parametrize(
    ("count", "kills"), [pytest.param(20_000, 3, marks=pytest.mark.timeout(3600)), pytest.param(300, 1, marks=pytest.mark.system)]
)
async def test_acknowledged_image_is_there_once_whatever_process_is_killed(
    repository: Path, tmp_path: Path, record_figure: RecordFigure, count: int, kills: int
) -> None:
    with searching(repository, tmp_path) as fleet:
        ingest = Ingest(fleet, ONLY_VECTORS, count)
        async with asyncio.TaskGroup() as group:
            group.create_task(ingest.run())
            group.create_task(kill_each(fleet, ingest, count, kills, record_figure))
        await get(fleet, "/query/stats")  # the database may have been killed last
        found = await stored(url_of(fleet))
        vectors = await vectors_in(url_of(fleet))
        hits = [
            json.loads((await post(fleet.sockets[0], "/search/image", ONLY_VECTORS.picture(number), top_k=1)).body)["results"]
            for number in range(1, count, max(1, count // 100))
        ]
    for status, requests in sorted(ingest.statuses.items()):
        record_figure(f"{count} images, answers {status or 'none'}", requests)

    assert len(ingest.acknowledged | ingest.given_up) == count
    assert ingest.acknowledged <= found.keys()
    assert found.keys() - ingest.acknowledged <= ingest.given_up
    assert set(found.values()) == {Counts(0, 1, 0)}
    for image_id, vector in vectors.items():
        pixels = np.full((_SIDE, _SIDE, 3), colour(int(image_id.removeprefix("image-"))), np.uint8)
        assert vector @ make_vector(zlib.crc32(pixels.tobytes())) > 0.999, image_id
    assert all(len(found) == 1 and found[0]["score"] > 0.999 for found in hits)


@pytest.mark.parametrize(
    ("count", "kills"), [pytest.param(250, 3, marks=pytest.mark.timeout(1200)), pytest.param(150, 1, marks=pytest.mark.system)]
)
async def test_an_image_is_there_with_all_its_parts(
    full_repository: Path, tmp_path: Path, record_figure: RecordFigure, count: int, kills: int
) -> None:
    with searching(full_repository, tmp_path, model="person_and_car", faces="true") as fleet:
        ingest = Ingest(fleet, ALL_PARTS, count)
        async with asyncio.TaskGroup() as group:
            group.create_task(ingest.run())
            group.create_task(kill_each(fleet, ingest, count, kills, record_figure))
        await get(fleet, "/query/stats")  # the database may have been killed last
        found = await stored(url_of(fleet))

    assert ingest.acknowledged <= found.keys() <= ingest.acknowledged | ingest.given_up
    assert set(found.values()) == {Counts(4, 5, 1)}


@pytest.mark.parametrize(
    ("count", "kills"), [pytest.param(2000, 3, marks=pytest.mark.timeout(1200)), pytest.param(300, 1, marks=pytest.mark.system)]
)
async def test_a_folder_is_indexed_although_its_worker_is_killed(
    repository: Path, tmp_path: Path, record_figure: RecordFigure, count: int, kills: int
) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:05}.png").write_bytes(ONLY_VECTORS.picture(number))
    with searching(repository, tmp_path, search_folders=folder) as fleet:
        await get(fleet, "/query/stats")  # search starts later than the others
        query: dict[str, Any] = {"directory": folder, "wait": "false", **ONLY_VECTORS.options}
        job = json.loads((await post(fleet.sockets[0], "/ingest/directory", **query)).body)

        async def progress() -> dict[str, Any]:
            return await get(fleet, f"/ingest/jobs/{job['job_id']}")

        async def beyond(total: float) -> bool:
            return float((await progress())["total"]) > total

        async def is_over() -> bool:
            return (await progress())["state"] in {"done", "failed"}

        for place in range(kills):
            await becomes(lambda place=place: beyond(count * (place + 1) / (kills + 2)))  # type: ignore[misc]
            killed, workers = monotonic(), fleet.workers()
            for worker in workers:  # one of them has the job
                worker.kill()
            for worker in workers:
                await until(lambda worker=worker: has_ended(worker))  # type: ignore[misc]
            before = (await progress())["total"]
            await becomes(lambda before=before: beyond(before))  # type: ignore[misc]
            record_figure("worker killed: the folder is indexed on after, s", monotonic() - killed)
        await becomes(is_over)
        ended = await progress()
        await get(fleet, "/query/stats")  # the database may have been killed last
        found = await stored(url_of(fleet))

    assert (ended["state"], ended["total"], ended["total_files"], ended["errors_count"]) == ("done", count, count, 0)
    assert ended["duplicates"] <= 64 * kills, "it went back further than to the last chunk"
    assert found == {f"{number:05}.png": Counts(0, 1, 0) for number in range(count)}


class Fault(NamedTuple):
    """How search, or its database, fails, and how the fault ends; without an end, the gateway itself must see to that."""

    begin: Callable[[Fleet], None]
    end: Callable[[Fleet], None] | None = None
    keeps_reading: bool = False
    """Whether only writing fails."""


def send_to_search(number: int) -> Callable[[Fleet], None]:
    return lambda fleet: os.killpg(search_of(fleet).pid, number)


def send_to_database(number: int) -> Callable[[Fleet], None]:
    def send(fleet: Fleet) -> None:
        database = fleet.database()
        assert database is not None
        for process in (database, *database.children()):
            process.send_signal(number)

    return send


def search_of(fleet: Fleet) -> psutil.Process:
    """Return the parent of the worker that searches, when it has been started."""
    (process,) = [each for each in fleet.instances() if each.name() == "search"]
    return process


def fill_disk(fleet: Fleet) -> None:
    with suppress(OSError), disk_of(fleet).open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**16))


def disk_of(fleet: Fleet) -> Path:
    """Return a file on the database's disk, which only the gateway's processes see."""
    return Path(f"/proc/{fleet.process.pid}/root", fleet.process.environ()["NEREID_DATABASE_HOME"][1:], "full")


FAULTS = {
    "stopped": Fault(send_to_search(signal.SIGSTOP), send_to_search(signal.SIGCONT)),
    "stopped for good": Fault(send_to_search(signal.SIGSTOP)),
    "killed": Fault(send_to_search(signal.SIGKILL)),
    "database stopped": Fault(send_to_database(signal.SIGSTOP), send_to_database(signal.SIGCONT)),
    "disk full": Fault(fill_disk, lambda fleet: disk_of(fleet).unlink(), keeps_reading=True),
}


@contextmanager
def small_disk() -> Iterator[tuple[Path, list[str]]]:
    """Make a home for a database; yield it, and a command that runs another one with a small disk there."""
    with database_home() as home:
        disk = home / "disk"
        disk.mkdir()
        mount = f"mount -t tmpfs -o size=256m,mode=711 tmpfs {disk} && ln -s {home}/server {disk}/server"
        yield disk, ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]


class Callers:
    """Twelve clients that detect and must not notice the fault, and requests of search."""

    def __init__(self, sockets: list[Path], fault: Fault) -> None:
        self._sockets, self._fault = sockets, fault
        self._numbers = count(1)
        self.detected: list[float] = []
        """Seconds of each answer to `/detect`."""
        self.searched: list[float] = []
        """Seconds of the slowest answer of each round of requests of search."""

    async def detect(self, client: int) -> None:
        async with await Connection.open(f"unix:{self._sockets[client % 2]}") as connection:
            while True:
                answer = await connection.ask(encode(ONLY_VECTORS.picture(7), Content_Type="image/png"))
                assert answer.status == 200, answer
                self.detected.append(answer.seconds)

    async def ready(self) -> bool:
        """Return whether search is, as a worker reports it that is itself ready."""
        answers = [post(self._sockets[1], path, method="GET") for path in ("/ready", "/readyz")]
        report, probe = await asyncio.gather(*answers)
        assert (report.status, probe.status) == (200, 200)
        return bool(json.loads(report.body)["services"]["search"]["ok"])

    async def search(self) -> set[bool]:
        """Add two images, one while its vector is asked for, and search; return whether requests were answered."""
        number = next(self._numbers)
        picture = ONLY_VECTORS.picture(number)
        answers = await asyncio.gather(
            post(self._sockets[0], "/ingest", picture, image_id=number, **ONLY_VECTORS.options),
            post(self._sockets[1], "/embed/image", picture, index="true", image_id=f"embedded-{number}"),
            *([] if self._fault.keeps_reading else [post(self._sockets[0], "/search/image", picture)]),
        )
        self.searched.append(max(answer.seconds for answer in answers))
        return {is_answered(answer) for answer in answers}

    async def all_work(self) -> bool:
        is_ready, answered = await asyncio.gather(self.ready(), self.search())
        return is_ready and answered == {True}

    async def all_fail(self) -> bool:
        is_ready, answered = await asyncio.gather(self.ready(), self.search())
        return is_ready == self._fault.keeps_reading and answered == {False}

    async def measure(self, holds: Callable[[], Awaitable[bool]]) -> None:
        """Wait until there are enough answers to `/detect`, and something holds."""

        async def is_measured() -> bool:
            return await holds() and len(self.detected) >= _DETECTED

        await becomes(is_measured)


def is_answered(answer: Answer) -> bool:
    """Return whether search is available; there is no other failure."""
    if answer.status in ACKNOWLEDGED:
        return True
    assert (answer.status, json.loads(answer.body)["code"]) == (503, "search_unavailable"), answer
    return False


@NEEDS_MOUNTS
@pytest.mark.parametrize("name", FAULTS)
async def test_detection_goes_on_while_search_is_away(
    repository: Path, tmp_path: Path, record_figure: RecordFigure, name: str
) -> None:
    fault = FAULTS[name]
    with small_disk() as (home, wrapper), searching_at(home, repository, tmp_path, wrapper) as fleet:
        workers = [worker for each in fleet.instances() if each != search_of(fleet) for worker in fleet.workers_of(each)]
        callers = Callers(fleet.sockets, fault)
        async with meanwhile(*map(callers.detect, range(12))), await Connection.open(f"unix:{fleet.sockets[0]}") as connection:
            await becomes(callers.all_work)
            callers.detected.clear()
            await callers.measure(callers.all_work)
            record_figure(f"{name}: p99 of /detect before, ms", p99_ms(callers.detected))

            query = urlencode(ONLY_VECTORS.options)
            request = encode(ONLY_VECTORS.picture(0), f"/ingest?{query}", Content_Type="image/png")
            await connection.send(request[:-1])
            await asyncio.to_thread(fault.begin, fleet)
            began = monotonic()
            callers.detected.clear()
            callers.searched.clear()
            async with asyncio.TaskGroup() as group:
                under_way = group.create_task(connection.ask(request[-1:]))
                group.create_task(becomes(callers.all_fail))
            assert fault.keeps_reading or not is_answered(under_way.result())
            if fault.end is not None:
                await callers.measure(callers.all_fail)
                record_figure(f"{name}: median of later answers of search, s", float(np.median(callers.searched[1:])))
                await asyncio.to_thread(fault.end, fleet)
                began = monotonic()
            record_figure(f"{name}: first answer of search, s", callers.searched[0])
            await becomes(callers.all_work)
            record_figure(f"{name}: search is back after, s", monotonic() - began)
            await callers.measure(callers.all_work)
            record_figure(f"{name}: p99 of /detect meanwhile, ms", p99_ms(callers.detected))
        assert not any(map(has_ended, workers))


def p99_ms(seconds: list[float]) -> float:
    return float(np.percentile(seconds, 99)) * 1e3
