"""Search while processes are killed or hang: what was acknowledged is there once, nothing by half, and detection goes on."""

import asyncio
import itertools
import json
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import urlencode

import asyncpg
import psutil
import pytest

from app.settings.schema import Settings
from tests.faults.conftest import RecordFigure
from tests.faults.exchange import Answer, Connection, encode
from tests.faults.fleet import Fleet
from tests.faults.meanwhile import meanwhile
from tests.faults.searching import (
    ACKNOWLEDGED,
    ALL_PARTS,
    AWAY,
    ONLY_VECTORS,
    Counts,
    Kind,
    becomes,
    get,
    post,
    searching,
    until,
)
from tests.processes import has_ended
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture

CLIENTS = 8


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
    for place, name in enumerate([*victims] * kills, 1):
        share = count * place / (kills * len(victims) + 1)
        await until(lambda share=share: len(ingest.acknowledged) > share or ingest.is_over)  # type: ignore[misc]
        await until(victims[name])
        victim = victims[name]()
        assert victim is not None
        victim.kill()
        await until(lambda victim=victim: has_ended(victim))  # type: ignore[misc]
        before, killed = len(ingest.acknowledged), monotonic()
        await until(lambda before=before: len(ingest.acknowledged) > before + CLIENTS or ingest.is_over)  # type: ignore[misc]
        record(f"{name} killed: images are added again after, s", monotonic() - killed)


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


@pytest.mark.parametrize(
    ("kind", "count", "kills"),
    [
        pytest.param(ONLY_VECTORS, 300, 1, marks=pytest.mark.system),
        pytest.param(ALL_PARTS, 150, 1, marks=pytest.mark.system),
        (ONLY_VECTORS, 4_000, 3),
    ],
    ids=["vectors", "all-parts", "many"],
)
async def test_acknowledged_image_is_there_once_with_all_its_parts(
    tmp_path: Path, record_figure: RecordFigure, kind: Kind, count: int, kills: int
) -> None:
    with searching(kind, tmp_path) as fleet:
        ingest = Ingest(fleet, kind, count)
        async with asyncio.TaskGroup() as group:
            group.create_task(ingest.run())
            group.create_task(kill_each(fleet, ingest, count, kills, record_figure))
        found = await stored(fleet)
        asked = [kind.picture(number) for number in range(1, count, count // 50)] if kind is ONLY_VECTORS else []
        hits = [json.loads((await post(fleet.sockets[0], "/search/image", picture, top_k=1)).body)["results"] for picture in asked]
    for status, requests in sorted(ingest.statuses.items()):
        record_figure(f"{count} images, answers {status or 'none'}", requests)

    assert len(ingest.acknowledged | ingest.given_up) == count
    assert ingest.acknowledged <= found.keys() <= ingest.acknowledged | ingest.given_up
    assert set(found.values()) == {kind.counts}
    assert all(len(found) == 1 and found[0]["score"] > 0.999 for found in hits)


@pytest.mark.system
async def test_folder_is_indexed_although_its_worker_is_killed(tmp_path: Path, record_figure: RecordFigure) -> None:
    count = 300
    (folder := tmp_path / "pictures").mkdir()
    for number in range(count):
        (folder / f"{number:05}.png").write_bytes(ONLY_VECTORS.picture(number))
    with searching(ONLY_VECTORS, tmp_path, search_folders=folder) as fleet:
        await get(fleet, "/query/stats")  # search starts later than the others
        query: dict[str, Any] = {"directory": folder, "wait": "false", **ONLY_VECTORS.options}
        job = json.loads((await post(fleet.sockets[0], "/ingest/directory", **query)).body)

        async def progress() -> dict[str, Any]:
            return await get(fleet, f"/ingest/jobs/{job['job_id']}")

        async def beyond(total: float) -> bool:
            return float((await progress())["total"]) > total

        async def is_over() -> bool:
            return (await progress())["state"] in {"done", "failed"}

        await becomes(lambda: beyond(count / 3))
        killed, workers = monotonic(), fleet.workers()
        for worker in workers:  # one of them has the job
            worker.kill()
        await until(lambda: all(map(has_ended, workers)))
        before = (await progress())["total"]
        await becomes(lambda: beyond(before))
        record_figure("worker killed: the folder is indexed on after, s", monotonic() - killed)
        await becomes(is_over)
        ended = await progress()
        found = await stored(fleet)

    assert (ended["state"], ended["total"], ended["total_files"], ended["errors_count"]) == ("done", count, count, 0)
    assert ended["duplicates"] <= 64, "it went back further than to the last chunk"
    assert found == {f"{number:05}.png": Counts(0, 1, 0) for number in range(count)}


def search_of(fleet: Fleet) -> psutil.Process:
    """Return the parent of the worker that searches."""
    (process,) = [each for each in fleet.instances() if each.name() == "search"]
    return process


def database_of(fleet: Fleet) -> psutil.Process:
    database = fleet.database()
    assert database is not None
    return database


def is_answered(answer: Answer) -> bool:
    """Return whether search is available; there is no other failure."""
    if answer.status in ACKNOWLEDGED:
        return True
    assert (answer.status, json.loads(answer.body)["code"]) == (503, "search_unavailable"), answer
    return False


@pytest.mark.parametrize(
    ("victim", "begin", "end"),
    [
        (search_of, signal.SIGSTOP, signal.SIGCONT),
        (search_of, signal.SIGSTOP, 0),  # the gateway itself sees to its end
        (search_of, signal.SIGKILL, 0),
        (database_of, signal.SIGSTOP, signal.SIGCONT),
    ],
    ids=["stopped", "stopped-for-good", "killed", "database-stopped"],
)
async def test_detection_goes_on_while_search_is_away(
    tmp_path: Path, record_figure: RecordFigure, victim: Callable[[Fleet], psutil.Process], begin: int, end: int
) -> None:
    request = encode(ONLY_VECTORS.picture(0), f"/ingest?{urlencode(ONLY_VECTORS.options)}", Content_Type="image/png")
    numbers = itertools.count(1)
    detected = 0

    async def detect(socket: Path) -> None:
        nonlocal detected
        async with await Connection.open(f"unix:{socket}") as connection:
            while True:
                answer = await connection.ask(encode(ONLY_VECTORS.picture(7), Content_Type="image/png"))
                assert answer.status == 200, answer
                detected += 1

    async def search() -> set[bool]:
        """Ask a worker, itself ready, whether search is; add two images, one while its vector is asked for, and search."""
        number, (one, other) = next(numbers), fleet.sockets
        picture = ONLY_VECTORS.picture(number)
        report, probe, *answers = await asyncio.gather(
            post(other, "/ready", method="GET"),
            post(other, "/readyz", method="GET"),
            post(one, "/ingest", picture, image_id=number, **ONLY_VECTORS.options),
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

    with searching(ONLY_VECTORS, tmp_path) as fleet:
        workers = [worker for each in fleet.instances() if each != search_of(fleet) for worker in fleet.workers_of(each)]
        async with meanwhile(*map(detect, fleet.sockets * 6)), await Connection.open(f"unix:{fleet.sockets[0]}") as connection:
            await becomes(lambda: is_available(wanted=True))
            await connection.send(request[:-1])
            process = victim(fleet)
            family = [process, *process.children(recursive=True)]
            send(begin)
            async with asyncio.TaskGroup() as group:
                under_way = group.create_task(connection.ask(request[-1:]))
                group.create_task(becomes(lambda: is_available(wanted=False)))
            assert not is_answered(under_way.result())
            if end:
                enough = detected + 500
                await becomes(lambda: is_available(wanted=False, detections=enough))
                send(end)
            began, enough = monotonic(), detected + 500
            await becomes(lambda: is_available(wanted=True))
            record_figure("search is back after, s", monotonic() - began)
            await becomes(lambda: is_available(wanted=True, detections=enough))
        assert not any(map(has_ended, workers))
