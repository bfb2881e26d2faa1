"""The result cache in front of a real model, with a real Redis that is killed and hangs: no answer is another one's."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from io import BytesIO
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest
from onnx import ModelProto, helper, parser
from PIL import Image

from tests.faults.exchange import Answer, Connection, encode
from tests.faults.fleet import Fleet, running_fleet
from tests.processes import run_nereid
from tests.redis_server import RedisServer, redis_server

PHOTOS, REQUESTS, CLIENTS, WORKERS = 200, 10_000, 16, 4
HIT = "hit"


class Asked(NamedTuple):
    photo: int
    answer: Answer

    @property
    def cache(self) -> str:
        return self.answer.headers.get("x-cache", "")


def network() -> ModelProto:
    """Make a network that finds one object, whose box and score are pixels of the image; exact, however many images a batch has."""
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
    network (float[batch, 3, 128, 256] images) => (float[batch, 5, 672] output0) {
        starts = Constant <value_ints = [0, 60, 50]> ()
        ends = Constant <value_ints = [1, 61, 201]> ()
        axes = Constant <value_ints = [1, 2, 3]> ()
        steps = Constant <value_ints = [1, 1, 35]> ()
        pixels = Slice (images, starts, ends, axes, steps)
        column = Constant <value_ints = [0, 5, 1]> ()
        five = Reshape (pixels, column)
        scale = Constant <value = float[5, 1] {60.0, 30.0, 40.0, 40.0, 0.4}> ()
        offset = Constant <value = float[5, 1] {90.0, 50.0, 20.0, 20.0, 0.3}> ()
        scaled = Mul (five, scale)
        moved = Add (scaled, offset)
        pads = Constant <value_ints = [0, 0, 0, 0, 0, 671]> ()
        output0 = Pad (moved, pads)
    }""")
    helper.set_model_props(model, {"names": "{0: 'spot'}"})
    return model


def photo(number: int) -> bytes:
    blocks = np.random.default_rng(number).integers(0, 256, (8, 12, 3), np.uint8)
    file = BytesIO()
    Image.fromarray(blocks).resize((384, 256), Image.Resampling.NEAREST).save(file, "JPEG", quality=90)
    return file.getvalue()


class Service(NamedTuple):
    """A `serve` with the model `pixels` and a cache in Redis."""

    fleet: Fleet
    redis: RedisServer
    photos: list[bytes]
    key: str

    async def ask(self, photos: Sequence[int], **headers: str) -> list[Asked]:
        """Send photos in this order, over connections to all workers."""
        left, asked = iter(photos), []

        async def run_client(number: int) -> None:
            socket = self.fleet.sockets[number % WORKERS]
            async with await Connection.open(f"unix:{socket}") as connection:
                for position in left:
                    request = encode(self.photos[position], X_API_Key=self.key, **headers)
                    asked.append(Asked(position, await connection.ask(request)))

        await asyncio.gather(*map(run_client, range(CLIENTS)))
        return asked

    async def uncached(self) -> list[Any]:
        """Return what is found in each photo without the cache."""
        asked = await self.ask(range(PHOTOS), Cache_Control="no-store")
        assert {one.cache for one in asked} <= {"", "bypass"}
        return [result(one) for one in sorted(asked)]


def result(asked: Asked) -> Any:  # noqa: ANN401 - a JSON document
    assert asked.answer.status == 200, asked.answer.body
    document = json.loads(asked.answer.body)
    return {name: value for name, value in document.items() if not name.endswith(("_ms", "_id"))}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with TemporaryDirectory() as name, redis_server(Path(name)) as redis:
        folder, repository = Path(name), Path(name) / "models"
        repository.mkdir()
        secret = _private(folder / "secret", "a secret of at least thirty-two bytes")
        cache = {"cache": redis.url, "cache_key_file": secret}
        given = {"model_repository": repository, "triton_home": folder / "triton", **cache}
        made = run_nereid("key", "one", **given)
        keys = _private(folder / "keys.toml", made.stderr)
        settings = {"model": "pixels", "api_keys_file": keys, "timeout_seconds": 30, **cache}
        (folder / "network.onnx").write_bytes(network().SerializeToString())
        run_nereid("add", folder / "network.onnx", "--name", "pixels", **given).check_returncode()
        with running_fleet(repository, folder, instances=WORKERS, settings=settings) as fleet:
            photos = [photo(number) for number in range(PHOTOS)]
            made_service = Service(fleet, redis, photos, made.stdout.strip())
            while "" in {one.cache for one in asyncio.run(made_service.ask(range(PHOTOS)))}:
                pass  # workers that do not know the model yet
            yield made_service


def _private(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    return path


@pytest.mark.timeout(300)  # ten thousand requests, and the pauses of circuits
async def test_no_answer_is_another_ones_while_redis_comes_and_goes(service: Service) -> None:
    weights = 1 / np.arange(1, PHOTOS + 1)
    draw = np.random.default_rng(1).choice(PHOTOS, REQUESTS, p=weights / weights.sum()).tolist()
    left = iter(draw)
    expected = await service.uncached()
    assert len({str(one) for one in expected}) == PHOTOS
    parts: dict[str, list[Asked]] = {"without the cache": await service.ask(draw[:2000], Cache_Control="no-store")}

    async def ask(name: str, count: int) -> None:
        parts[name] = await service.ask(list(islice(left, count)))

    async def ask_until_hit() -> None:
        asked: list[Asked] = []
        while HIT not in {one.cache for one in asked}:
            asked += await service.ask(range(CLIENTS))
        parts.setdefault("until Redis is used again", []).extend(asked)

    await ask("with Redis", 2000)
    for number in ("first", "second"):
        asking = asyncio.create_task(ask(f"{number} kill", 1500))
        await asyncio.sleep(0.1)  # while requests are under way
        service.redis.kill()
        await asking
        service.redis.start()
        await ask_until_hit()
        await ask(f"after the {number} kill", 1250)
    with service.redis.stopped():
        await ask("while it hangs", 1500)
    await ask_until_hit()
    await ask("after it has hung", 1000)

    assert next(left, None) is None
    for name, asked in parts.items():
        assert [result(one) for one in asked] == [expected[one.photo] for one in asked], name
    assert HIT in {one.cache for one in parts["with Redis"]}
    assert HIT not in {one.cache for one in parts["while it hangs"]}
