"""Search while processes are killed or hang: what was acknowledged is there once, nothing by half, and detection goes on."""

import asyncio
import itertools
import json
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple
from urllib.parse import urlencode

import asyncpg
import psutil
import pytest

from app.settings.schema import Settings
from tests.fakes import models as small_models
from tests.fakes import other_tasks
from tests.faults.exchange import NO_ANSWER, Answer, Connection, ask, encode
from tests.faults.fleet import Fleet, running_fleet
from tests.faults.meanwhile import meanwhile
from tests.faults.meanwhile import until as until_in_thread
from tests.postgres import database_home
from tests.processes import PATIENCE_SECONDS, has_ended
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture
from tests.support import until

ACKNOWLEDGED = {200, 201}
AWAY = {NO_ANSWER, 408, 429, 503, 504}
"""Statuses while something is away, or the machine is busy."""
CLIENTS = 8


class Counts(NamedTuple):
    parts: int
    vectors: int
    lines: int


# In each picture: a car and a person, each with a face, and a line of text.
ALL_PARTS, ONLY_VECTORS = Counts(4, 5, 1), Counts(0, 1, 0)
_WITH_PARTS = {"detect_near_duplicates": "false"}
_WITHOUT_PARTS = {**_WITH_PARTS, "enable_detection": "false", "enable_faces": "false", "enable_ocr": "false"}


def draw(number: int) -> bytes:
    return small_models.scene("PNG", f"#{255 - number % 16:02x}{255 - number // 16 % 16:02x}{255 - number // 256:02x}")


@contextmanager
def searching(folder: Path, **settings: object) -> Iterator[Fleet]:
    """Run `serve` with search, in two instances and with a PostgreSQL of its own, until the block ends."""
    repository = folder / "models"
    small_models.write(repository)
    other_tasks.write_readers(repository)
    for model in repository.iterdir():  # a Triton that is restarted loads all that there are
        if not model.name.startswith(("person_and_car", "faces", "ocr", "embedding")):
            shutil.rmtree(model)
    given = {"search": "on", "timeout_seconds": 20, "model": "person_and_car", "faces": "true", **settings}
    with database_home() as home:
        with running_fleet(repository, folder, settings={"database_home": home, **given}) as fleet:
            yield fleet
        Settings(database_home=str(home)).database_folder.rmdir()


async def post(socket: Path, path: str, body: bytes = b"", method: str = "POST", **query: object) -> Answer:
    """Ask an instance; a connection that is refused or broken is no answer."""
    headers = {"Content_Type": "image/png"} if body else {}
    try:
        return await ask(f"unix:{socket}", encode(body, f"{path}?{urlencode(query)}", method, **headers))
    except OSError:
        return Answer(NO_ANSWER, {}, b"")


async def get(fleet: Fleet, path: str, body: bytes = b"", method: str = "GET", **query: object) -> dict[str, Any]:
    end = monotonic() + PATIENCE_SECONDS
    while (answer := await post(fleet.sockets[0], path, body, method, **query)).status in AWAY:
        assert monotonic() < end
        await asyncio.sleep(0.2)
    assert answer.status in ACKNOWLEDGED | {202}, answer
    return dict(json.loads(answer.body))


class Ingest:
    """Clients that add pictures. Every third one is not sent again after a failure: it must be there in full, or not at all."""

    def __init__(self, fleet: Fleet, options: Mapping[str, str], count: int) -> None:
        self._fleet, self._options = fleet, options
        self._left = iter(range(count))
        self.acknowledged: set[str] = set()
        self.given_up: set[str] = set()
        self.is_over = False

    async def run(self) -> None:
        await asyncio.gather(*(self._run_client(number) for number in range(CLIENTS)))
        self.is_over = True

    async def _run_client(self, client: int) -> None:
        for number in self._left:
            while not await self._add(client + number, f"image-{number}", draw(number)):
                if number % 3 == 0:
                    self.given_up.add(f"image-{number}")
                    break
                await asyncio.sleep(0.2)

    async def _add(self, turn: int, image_id: str, picture: bytes) -> bool:
        sockets = self._fleet.sockets or [Path("/nowhere")]  # for a moment, none listens
        answer = await post(sockets[turn % len(sockets)], "/ingest", picture, image_id=image_id, **self._options)
        if answer.status in ACKNOWLEDGED:
            assert json.loads(answer.body)["image_id"] == image_id
            self.acknowledged.add(image_id)
            return True
        assert answer.status in AWAY, answer
        return False


async def kill_each(fleet: Fleet, ingest: Ingest, count: int) -> None:
    """Kill a worker, the database and Triton in turn, spread over the time in which so many images are added."""
    victims = [lambda: next(iter(fleet.workers()), None), fleet.database, fleet.triton]
    for place, victim in enumerate(victims, 1):
        share = count * place / (len(victims) + 1)
        await until_in_thread(lambda share=share: len(ingest.acknowledged) > share or ingest.is_over)  # type: ignore[misc]
        await until_in_thread(victim)
        process = victim()
        assert process is not None
        process.kill()
        await until_in_thread(lambda process=process: has_ended(process))  # type: ignore[misc]


async def stored(fleet: Fleet) -> dict[str, Counts]:
    """Return what is there of each image; no vector, part or text is there without its image."""
    await get(fleet, "/query/stats")  # the database may have been killed last
    home = fleet.process.environ()["NEREID_DATABASE_HOME"]
    connection = await asyncpg.connect(Settings(database_home=home).search_database)
    try:
        numbers = [row[0] for row in await connection.fetch("SELECT number FROM models")]
        for table in ("parts", "texts", *(f"vectors_{number}" for number in numbers)):
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


@pytest.mark.system
@pytest.mark.parametrize(("options", "count", "counts"), [(_WITHOUT_PARTS, 300, ONLY_VECTORS), (_WITH_PARTS, 150, ALL_PARTS)])
async def test_acknowledged_image_is_there_once_with_all_its_parts(
    tmp_path: Path, options: Mapping[str, str], count: int, counts: Counts
) -> None:
    with searching(tmp_path) as fleet:
        ingest = Ingest(fleet, options, count)
        async with asyncio.TaskGroup() as group:
            group.create_task(ingest.run())
            group.create_task(kill_each(fleet, ingest, count))
        found = await stored(fleet)
        hits = (await get(fleet, "/search/image", draw(count - 1), "POST", top_k=1))["results"]

    assert len(ingest.acknowledged | ingest.given_up) == count
    assert ingest.acknowledged <= found.keys() <= ingest.acknowledged | ingest.given_up
    assert set(found.values()) == {counts}
    assert [hit["score"] > 0.999 for hit in hits] == [True]


@pytest.mark.system
async def test_folder_is_indexed_although_its_worker_is_killed(tmp_path: Path) -> None:
    count = 300
    (folder := tmp_path / "pictures").mkdir()
    for number in range(count):
        (folder / f"{number:05}.png").write_bytes(draw(number))
    with searching(tmp_path, search_folders=folder) as fleet:
        await get(fleet, "/query/stats")  # search starts later than the others
        query: dict[str, Any] = {"directory": folder, "wait": "false", **_WITHOUT_PARTS}
        job = await get(fleet, "/ingest/directory", method="POST", **query)

        async def progress() -> dict[str, Any]:
            return await get(fleet, f"/ingest/jobs/{job['job_id']}")

        while (await progress())["total"] <= count / 3:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.05)
        workers = fleet.workers()
        for worker in workers:  # one of them has the job
            worker.kill()
        await until_in_thread(lambda: all(map(has_ended, workers)))
        while (ended := await progress())["state"] not in {"done", "failed"}:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.05)
        found = await stored(fleet)

    assert (ended["state"], ended["total"], ended["total_files"], ended["errors_count"]) == ("done", count, count, 0)
    assert ended["duplicates"] <= 64, "it went back further than to the last chunk"
    assert found == {f"{number:05}.png": ONLY_VECTORS for number in range(count)}


def search_of(fleet: Fleet) -> psutil.Process:
    (process,) = [each for each in fleet.instances() if each.name() == "search"]
    return process


def is_answered(answer: Answer) -> bool:
    """Return whether search is available; there is no other failure."""
    if answer.status in ACKNOWLEDGED:
        return True
    assert (answer.status, json.loads(answer.body)["code"]) == (503, "search_unavailable"), answer
    return False


@pytest.mark.parametrize("is_continued", [True, False])
async def test_detection_goes_on_while_search_hangs(tmp_path: Path, *, is_continued: bool) -> None:
    """A hanging process that nobody continues is killed and started again by the gateway."""
    request = encode(draw(0), f"/ingest?{urlencode(_WITHOUT_PARTS)}", Content_Type="image/png")
    numbers = itertools.count(1)
    detected = 0

    async def detect(socket: Path) -> None:
        nonlocal detected
        async with await Connection.open(f"unix:{socket}") as connection:
            while True:
                answer = await connection.ask(encode(draw(7), Content_Type="image/png"))
                assert answer.status == 200, answer
                detected += 1

    async def search() -> set[bool]:
        """Ask a worker, itself ready, whether search is; add two images, one while its vector is asked for, and search."""
        number, (one, other) = next(numbers), fleet.sockets
        picture = draw(number)
        report, probe, *answers = await asyncio.gather(
            post(other, "/ready", method="GET"),
            post(other, "/readyz", method="GET"),
            post(one, "/ingest", picture, image_id=number, **_WITHOUT_PARTS),
            post(other, "/embed/image", picture, index="true", image_id=f"embedded-{number}"),
            post(one, "/search/image", picture),
        )
        assert (report.status, probe.status) == (200, 200)
        return {bool(json.loads(report.body)["services"]["search"]["ok"]), *map(is_answered, answers)}

    async def is_available(*, wanted: bool, detections: int = 0) -> bool:
        return await search() == {wanted} and detected >= detections

    def send(number: int) -> None:
        for each in reversed(family):  # their parent last: some end with it
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)

    with searching(tmp_path) as fleet:
        workers = [worker for each in fleet.instances() if each != search_of(fleet) for worker in fleet.workers_of(each)]
        async with meanwhile(*map(detect, fleet.sockets * 6)), await Connection.open(f"unix:{fleet.sockets[0]}") as connection:
            await until(lambda: is_available(wanted=True))
            await connection.send(request[:-1])
            process = search_of(fleet)
            family = [process, *process.children(recursive=True)]
            send(signal.SIGSTOP)
            async with asyncio.TaskGroup() as group:
                under_way = group.create_task(connection.ask(request[-1:]))
                group.create_task(until(lambda: is_available(wanted=False)))
            assert not is_answered(under_way.result())
            if is_continued:
                await until(lambda enough=detected + 500: is_available(wanted=False, detections=enough))  # type: ignore[misc]
                send(signal.SIGCONT)
            await until(lambda enough=detected + 500: is_available(wanted=True, detections=enough))  # type: ignore[misc]
        assert not any(map(has_ended, workers))
