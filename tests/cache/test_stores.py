"""Stores: a memory file that all workers of a host share, and a real Redis; whatever happens to them is a miss."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path

import pytest
from redis.asyncio import Redis
from structlog.testing import CapturedCall

from app.features.cache import redis_store
from app.features.cache.instruments import Instruments
from app.features.cache.memory import MemoryStore, create, open_file, read_secret_of
from app.features.cache.redis_store import RedisStore
from app.resilience.worker_table import WorkerTable
from tests.nginx import write_certificate
from tests.redis_server import RedisServer, redis_server
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture
from tests.support import ROOT, TABLE, OpenTable, captured_log, free_port

INSTRUMENTS = Instruments(TABLE)
VARIABLE = "NEREID_INTERNAL_CACHE_FD"

OpenStore = Callable[..., MemoryStore]

WRITER = """
import asyncio, random, sys
from hashlib import sha256
from app.features.cache.instruments import Instruments
from app.features.cache.memory import MemoryStore, open_file
from app.resilience.worker_table import WorkerTable

async def write():
    store, draw = MemoryStore(open_file(0), 60, Instruments(WorkerTable())), random.Random(int(sys.argv[1]))
    for number in range(int(sys.argv[2])):
        value = draw.randbytes(draw.randrange(3000))
        await store.put(sha256(value).digest(), value)
        if number == 500:
            print("writing", flush=True)

asyncio.run(write())
"""
SEED, VALUES = 3, 2000


@pytest.fixture
def open_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenStore]:
    """Makes the store of a further worker of one host, whose memory file this process has created."""
    monkeypatch.setenv(VARIABLE, "")  # restored in the end, whatever `create` writes
    descriptor = create(1 << 16)
    opened: list[MemoryStore] = []

    def open_one(seconds: float = 60, metrics: Instruments = INSTRUMENTS) -> MemoryStore:
        opened.append(MemoryStore(open_file(0), seconds, metrics))
        return opened[-1]

    yield open_one
    for store in opened:
        asyncio.run(store.close())
    os.close(descriptor)


def key(number: int) -> bytes:
    return sha256(b"%d" % number).digest()


def value(number: int) -> bytes:
    return sha256(b"%d" % number).digest() * (1 + number % 60)


def run(store: MemoryStore, *numbers: int) -> list[bool]:
    """Put values; return which of them are there in the end, unchanged."""

    async def put_and_get() -> list[bool]:
        for number in numbers:
            await store.put(key(number), value(number))
        return [await store.get(key(number)) == value(number) for number in numbers]

    return asyncio.run(put_and_get())


def test_workers_find_what_others_have_put(open_store: OpenStore) -> None:
    one, other = open_store(), open_store()
    assert asyncio.run(other.get(key(1))) is None
    assert run(one, 1, 2) == [True, True]

    assert asyncio.run(other.get(key(1))) == value(1)
    asyncio.run(other.put(key(1), b"newer"))
    assert asyncio.run(one.get(key(1))) == b"newer"


def test_the_oldest_values_leave(open_store: OpenStore, open_table: OpenTable) -> None:
    metrics = Instruments(open_table())
    found = run(open_store(metrics=metrics), *range(500))
    evictions = next(sample.value for sample in metrics.evictions.collect({"api_cache_evictions": [()]}).samples)

    assert 0 < found.count(True) < 200
    assert all(found[-20:])
    assert not any(found[:200])
    assert 0 < evictions <= found.count(False)  # counted once their place in the index is used again


@pytest.mark.system
def test_many_processes_write_at_the_same_time(open_store: OpenStore) -> None:
    store = open_store()
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, f"{seed}", f"{values}"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            pass_fds=[int(os.environ[VARIABLE])],
            stdout=subprocess.PIPE,
        )
        for seed, values in ((1, 10**9), (2, 10**9), (SEED, VALUES))
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
    suspended, killed, last = writers
    suspended.send_signal(signal.SIGSTOP)
    killed.kill()
    assert last.wait() == 0
    suspended.kill()
    for writer in writers:
        writer.communicate()
    draw = random.Random(SEED)  # noqa: S311 - as the writer
    values = [draw.randbytes(draw.randrange(3000)) for _ in range(VALUES)]
    found = [asyncio.run(store.get(sha256(each).digest())) for each in values]

    assert all(one in {None, each} for one, each in zip(found, values, strict=True))
    assert run(store, 1, 2, 3) == [True] * 3


def test_the_secret_of_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"s" * 31)
    with pytest.raises(ValueError, match="has 31 bytes, and needs at least 32"):
        read_secret_of(str(file))
    file.write_bytes(b"s" * 32)
    one = read_secret_of(str(file))
    file.write_bytes(b"s" * 33)
    other = read_secret_of(str(file))
    file.unlink()

    assert len(one) == 64
    assert one != other == read_secret_of(str(file))  # a worker that is started meanwhile needs it


KEY, OTHER = b"k" * 32, b"o" * 32
VALUE = bytes(range(256)) * 8


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server


@pytest.fixture
def metrics(table: WorkerTable) -> Instruments:
    return Instruments(table)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine fails no operation, unless the test says so."""
    monkeypatch.setattr(redis_store, "_SECONDS", 20.0)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[CapturedCall]:
    return captured_log(monkeypatch, redis_store)


@asynccontextmanager
async def opened(url: str, metrics: Instruments) -> AsyncIterator[RedisStore]:
    store = RedisStore(url, 60, metrics)
    yield store
    await store.close()


def counted(metrics: Instruments) -> tuple[int, int]:
    counters = metrics.store_failures, metrics.circuit_open
    failures, circuits = (each.collect({each.name: [()]}).samples[0].value for each in counters)
    return int(failures), int(circuits)


async def test_user_needs_four_commands(server: RedisServer, metrics: Instruments, log: list[CapturedCall]) -> None:
    rule = "user gateway on >secret ~nereid:* resetchannels -@all +getrange +set +scan +unlink"
    async with Redis.from_url(server.url) as redis:
        await redis.execute_command("ACL", "SETUSER", *rule.split()[1:])  # type: ignore[no-untyped-call]

    async with opened(f"unix://gateway@{server.socket}?password=secret", metrics) as store:
        await store.put(KEY, VALUE)
        assert await store.get(KEY) == VALUE
        await redis_store.clear(f"unix://gateway@{server.socket}?password=secret")
        assert await store.get(KEY) is None
        assert counted(metrics) == (0, 0)

    async with opened(f"unix://gateway@{server.socket}?password=not-secret", metrics) as store:
        assert [await store.get(KEY) for _ in range(5)] == [None] * 5
    assert [call.method_name for call in log] == ["warning"]
    assert "not-secret" not in str(log)


async def test_tls_needs_a_trusted_certificate(tmp_path: Path, metrics: Instruments) -> None:
    write_certificate(tmp_path, "localhost")
    port, files = free_port(), {"cert": "tls.crt", "key": "tls.key", "ca-cert": "ca.crt"}
    options = " ".join(f"--tls-{kind}-file {tmp_path}/{name}" for kind, name in files.items())
    options += f" --tls-port {port} --tls-auth-clients no"
    with redis_server(tmp_path, *options.split()):
        url = f"rediss://localhost:{port}/0"
        async with opened(f"{url}?ssl_ca_certs={tmp_path}/ca.crt", metrics) as store:
            await asyncio.gather(*(store.put(key, VALUE) for key in (KEY, OTHER)))
            assert [await store.get(key) for key in (KEY, OTHER)] == [VALUE, VALUE]
        async with opened(url, metrics) as store:
            assert await store.get(KEY) is None


async def test_the_circuit_opens_and_closes(
    server: RedisServer, metrics: Instruments, log: list[CapturedCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "monotonic", lambda: 0.0)
    async with opened(server.url, metrics) as store:
        await store.put(KEY, VALUE)
        server.kill()

        for failures, seconds in enumerate((0.0, 100.0, 200.0), 5):  # each probe fails
            monkeypatch.setattr(redis_store, "monotonic", lambda now=seconds: now)
            assert [await store.get(KEY) for _ in range(9)] == [None] * 9
            assert counted(metrics) == (failures, 1)

        server.start()
        await store.put(KEY, VALUE)
        assert await store.get(KEY) is None  # not tried yet

        monkeypatch.setattr(redis_store, "monotonic", lambda: float("inf"))
        await store.put(KEY, VALUE)
        assert await store.get(KEY) == VALUE
        assert counted(metrics) == (7, 0)
        assert len(log) == 2


@pytest.mark.parametrize("is_late", [True, False])
async def test_answer_that_comes_too_late_or_to_a_caller_who_left_is_nobody_elses(
    server: RedisServer, metrics: Instruments, monkeypatch: pytest.MonkeyPatch, *, is_late: bool
) -> None:
    async with opened(server.url, metrics) as store:
        await store.put(KEY, VALUE)
        await store.put(OTHER, b"other")
        with server.stopped():
            monkeypatch.setattr(redis_store, "_SECONDS", 0.02 if is_late else 20.0)
            asking = asyncio.create_task(store.get(KEY))
            await asyncio.wait({asking}, timeout=None if is_late else 0.01)  # the question is on its way
            asking.cancel()
            (answer,) = await asyncio.gather(asking, return_exceptions=True)
            assert answer != VALUE
        monkeypatch.setattr(redis_store, "_SECONDS", 20.0)

        assert await store.get(OTHER) == b"other"
        assert counted(metrics) == (is_late, 0)


@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"-\xff\r\n", b"$x\r\n", b"$9999999999\r\nx", b":1\r\n", b"*1\r\n*1\r\n"],
)
async def test_garbage_is_a_miss(answer: bytes, tmp_path: Path, metrics: Instruments, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "_SECONDS", 0.02)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        writer.close()

    async with (
        await asyncio.start_unix_server(serve, tmp_path / "garbage.sock"),
        opened(f"unix://{tmp_path}/garbage.sock", metrics) as store,
    ):
        assert await store.get(KEY) is None
        await store.put(KEY, VALUE)
