"""`serve` with search, in two instances and with a PostgreSQL of its own, and pictures to add."""

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple
from urllib.parse import urlencode

from app.settings.schema import Settings
from bench.models.repository import write_embedding
from tests.fakes import models as small_models
from tests.fakes import text_models
from tests.faults import models
from tests.faults.exchange import NO_ANSWER, Answer, ask, encode
from tests.faults.fleet import Fleet, running_fleet
from tests.postgres import database_home

ACKNOWLEDGED, AWAY = {200, 201}, {NO_ANSWER, 429, 503}
_PATIENCE_SECONDS = 300.0


class Counts(NamedTuple):
    """What is there of an image."""

    parts: int
    vectors: int
    lines: int


class Kind(NamedTuple):
    """Pictures, what is asked of each, with which models and settings, and what must then be there."""

    picture: Callable[[int], bytes]
    options: Mapping[str, str]
    counts: Counts
    write: Callable[[Path], None]
    settings: Mapping[str, object]


def _write_with_embedding(folder: Path) -> None:
    """Write a model of vectors that takes a millisecond, and a detector."""
    models.write(folder)
    write_embedding(folder, 1)


def _write_all_parts(folder: Path) -> None:
    small_models.write(folder)
    text_models.write(folder)
    for model in folder.iterdir():  # a Triton that is restarted loads all that there are
        if not model.name.startswith(("person_and_car", "faces", "ocr", "embedding")):
            shutil.rmtree(model)


ONLY_VECTORS = Kind(
    lambda number: models.solid(number % 256, number // 256 % 256, number // 65536),
    {"enable_detection": "false", "enable_faces": "false", "enable_ocr": "false"},
    Counts(0, 1, 0),
    _write_with_embedding,
    {},
)
# A car and a person, each with a face, on a bright background of its own.
ALL_PARTS = Kind(
    lambda number: small_models.scene("PNG", f"#{255 - number % 16:02x}{255 - number // 16 % 16:02x}ff"),
    {"detect_near_duplicates": "false"},
    Counts(4, 5, 1),
    _write_all_parts,
    {"model": "person_and_car", "faces": "true"},
)


@contextmanager
def searching(kind: Kind, folder: Path, **settings: object) -> Iterator[Fleet]:
    kind.write(folder / "models")
    with database_home() as home:
        given = {"search": "on", "database_home": home, "timeout_seconds": 10, **kind.settings, **settings}
        with running_fleet(folder / "models", folder, settings=given) as fleet:
            yield fleet
        Settings(database_home=str(home)).database_folder.rmdir()


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
