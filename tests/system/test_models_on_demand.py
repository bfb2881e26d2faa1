"""`serve` with more models than may be loaded: each request is answered or told to come again, and Triton never has more."""

import asyncio
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.triton.client import TritonClient
from tests.fakes import models
from tests.faults.exchange import Answer, Connection, encode
from tests.faults.fleet import Fleet, running_fleet
from tests.faults.meanwhile import meanwhile
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture
from tests.support import SCENE

DEFAULT = "six_columns"
OTHERS = ("doors", "gates", "fences", "roofs")
LIMIT = 2
SECONDS = 8.0


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    models.write(tmp_path / "all")
    repository = tmp_path / "models"
    for name in (DEFAULT, *OTHERS):
        shutil.copytree(tmp_path / "all" / DEFAULT, repository / name)
        config = repository / name / "config.pbtxt"
        config.write_text(config.read_text(encoding="utf-8").replace(f'"{DEFAULT}"', f'"{name}"'), encoding="utf-8")
    (repository / "broken" / "1").mkdir(parents=True)
    shutil.copy(repository / DEFAULT / "config.pbtxt", repository / "broken")
    (repository / "broken" / "1" / "model.onnx").write_bytes(b"no network")
    settings = {"model": DEFAULT, "loaded_models": LIMIT, "timeout_seconds": 10}
    with running_fleet(repository, tmp_path, settings=settings) as fleet:
        yield fleet


async def ask(fleet: Fleet, worker: int, model: str) -> Answer:
    async with await Connection.open(f"unix:{fleet.sockets[worker]}") as connection:
        return await connection.ask(encode(SCENE, f"/predict/{model}"))


async def ask_until_answered(fleet: Fleet, worker: int, model: str) -> Answer:
    while (answer := await ask(fleet, worker, model)).status == 503:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    return answer


async def test_requests_for_more_models_than_may_be_loaded(fleet: Fleet) -> None:
    client = TritonClient(fleet.triton_address)
    loaded: list[set[str]] = []
    answers: list[tuple[str, Answer]] = []

    async def look() -> set[str]:
        return {name for name, state in (await client.list_models()).items() if state.is_ready}

    async def keep_looking() -> None:
        while True:
            loaded.append(await look())
            await asyncio.sleep(0.02)

    async def keep_asking(worker: int, model: str) -> None:
        while True:
            answers.append((model, await ask(fleet, worker, model)))
            await asyncio.sleep(0.05)

    assert await look() == {DEFAULT}
    async with meanwhile(keep_looking()):
        clients = [keep_asking(worker, model) for worker in (0, 1) for model in (DEFAULT, *OTHERS)]
        async with meanwhile(*clients):
            await asyncio.sleep(SECONDS)
        for model in (*OTHERS, OTHERS[0]):  # in turn, at either worker
            for worker in (0, 1):
                assert (await ask_until_answered(fleet, worker, model)).status == 200
            assert await look() == {DEFAULT, model}
    statuses = Counter((model == DEFAULT, answer.status) for model, answer in answers)

    assert statuses.keys() <= {(True, 200), (False, 200), (False, 503)}, statuses
    assert statuses[False, 200]
    assert all("retry-after" in answer.headers for _, answer in answers if answer.status == 503)
    assert all(DEFAULT in models and len(models) <= LIMIT for models in loaded)
    refused = [await ask(fleet, worker, model) for worker in (0, 1) for model in ("broken", "no_model")]
    assert [answer.status for answer in refused] == [503, 404] * 2
    triton = fleet.triton()
    assert triton is not None
    triton.kill()
    for worker in (0, 1):
        assert (await ask_until_answered(fleet, worker, OTHERS[0])).status == 200
    await client.close()
