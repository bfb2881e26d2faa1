"""All workers of a host share a memory file of a fixed size, whatever happens to one of them."""

import asyncio
import fcntl
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from app.cache import memory
from app.cache.memory import MemoryStore, create, open_file, read_secret, read_secret_of
from app.telemetry.metrics import Metrics
from tests.support import METRICS, ROOT, OpenTable

VARIABLE = "NEREID_INTERNAL_CACHE_FD"
SIZE = 1 << 16

OpenStore = Callable[..., MemoryStore]

WRITER = """
import asyncio, random, sys
from hashlib import sha256
from app.cache.memory import MemoryStore, open_file
from app.resilience.worker_table import WorkerTable
from app.telemetry.metrics import Metrics

async def write():
    store, draw = MemoryStore(open_file(0), 60, Metrics(WorkerTable(), "0")), random.Random(int(sys.argv[1]))
    for number in range(int(sys.argv[2])):
        value = draw.randbytes(draw.randrange(3000))
        await store.put(sha256(value).digest(), value)
        if number == 500:
            print("writing", flush=True)

asyncio.run(write())
"""
SEED, VALUES = 3, 2000


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The memory file of a host, which this process has created."""
    monkeypatch.setenv(VARIABLE, "")  # restored in the end, whatever `create` writes
    descriptor = create(SIZE)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def open_store(host: int) -> Iterator[OpenStore]:
    assert host
    opened: list[MemoryStore] = []

    def open_one(seconds: float = 60, metrics: Metrics = METRICS) -> MemoryStore:
        opened.append(MemoryStore(open_file(0), seconds, metrics))
        return opened[-1]

    yield open_one
    for store in opened:
        asyncio.run(store.close())


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


def get(store: MemoryStore, number: int) -> bytes | None:
    return asyncio.run(store.get(key(number)))


def test_workers_find_what_others_have_put(open_store: OpenStore) -> None:
    one, other = open_store(), open_store()
    assert get(other, 1) is None
    assert run(one, 1, 2) == [True, True]

    assert get(other, 1) == value(1)
    asyncio.run(other.put(key(1), b"newer"))
    assert get(one, 1) == b"newer"


def test_processes_share_a_secret(host: int) -> None:
    descriptor, other = open_file(0), memory._create_file(0)  # noqa: SLF001

    assert read_secret(host) == read_secret(descriptor) != read_secret(other)
    assert any(read_secret(host))
    os.close(descriptor)
    os.close(other)


def test_the_oldest_values_leave(open_store: OpenStore, open_table: OpenTable) -> None:
    metrics = Metrics(open_table(), "0")
    store = open_store(metrics=metrics)
    found = run(store, *range(500))
    evictions = next(sample.value for sample in metrics.cache_evictions.collect({"api_cache_evictions": [()]}).samples)

    assert 0 < found.count(True) < 200
    assert all(found[-20:])
    assert not any(found[:200])
    assert 0 < evictions <= found.count(False)  # counted once their place in the index is used again


def test_set_has_room_for_eight_values(open_store: OpenStore) -> None:
    store = open_store()
    keys = [b"%08d" % number + bytes(24) for number in range(9)]

    async def put() -> list[bytes | None]:
        for each in (*keys[:8], keys[1], keys[0], keys[8]):
            await store.put(each, each)
        return [await store.get(each) for each in keys]

    assert asyncio.run(put()) == [None if each == keys[2] else each for each in keys]


def test_value_that_has_ended_or_does_not_fit_is_not_there(open_store: OpenStore) -> None:
    assert run(open_store(-1), 1) == [False]
    store = open_store()
    assert run(store, 1) == [True]
    for nbytes in (SIZE, 10 * SIZE):
        asyncio.run(store.put(key(2), bytes(nbytes)))
    assert get(store, 2) is None
    assert get(store, 1) == value(1)


def test_suspended_writer_delays_no_other(open_store: OpenStore) -> None:
    """It holds the lock: what others put meanwhile is not kept."""
    suspended, other = open_file(0), open_store()
    fcntl.flock(suspended, fcntl.LOCK_EX)
    assert run(other, 1) == [False]
    os.close(suspended)

    assert run(other, 1) == [True]


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


@pytest.mark.parametrize("byte", [b"\x00", b"\xff"])
def test_file_with_another_content_is_written_over(open_store: OpenStore, host: int, byte: bytes) -> None:
    store = open_store()
    run(store, *range(100))
    os.pwrite(host, byte * (SIZE - 64), 64)
    asyncio.run(store.get(key(1)))

    for _ in range(3):
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
