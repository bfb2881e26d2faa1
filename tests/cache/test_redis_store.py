"""Values in a real Redis: whatever happens to it is a miss."""

import asyncio
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import trustme
from redis.asyncio import Redis
from structlog.testing import CapturedCall

from app import preflight
from app.cache import redis_store
from app.cache.redis_store import MAX_BYTES, PREFIX, RedisStore
from app.resilience.worker_table import WorkerTable
from app.settings.schema import Settings, SettingsError
from app.telemetry.metrics import Metrics
from tests.redis_server import RedisServer, redis_server
from tests.support import captured_log, free_port

KEY, OTHER = b"k" * 32, b"o" * 32
VALUE = bytes(range(256)) * 8


@pytest.fixture(name="folder")
def short_folder() -> Iterator[Path]:
    """The path of a Unix socket is short."""
    with TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def server(folder: Path) -> Iterator[RedisServer]:
    with redis_server(folder) as server:
        yield server


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    table = WorkerTable()
    yield Metrics(table, "0")
    table.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine fails no operation, unless the test says so."""
    monkeypatch.setattr(redis_store, "_SECONDS", 20.0)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[CapturedCall]:
    return captured_log(monkeypatch, redis_store)


@asynccontextmanager
async def opened(url: str, metrics: Metrics) -> AsyncIterator[RedisStore]:
    store = RedisStore(url, 60, metrics)
    yield store
    await store.close()


def counted(metrics: Metrics) -> tuple[int, int]:
    """Return the number of failures, and whether the circuit is open."""
    families = {family.name: family.samples for family in metrics.collect()}
    failures, circuits = (families[f"api_cache_{name}"][0].value for name in ("store_failures", "circuit_open"))
    return int(failures), int(circuits)


async def test_value_is_kept_for_its_time(server: RedisServer, metrics: Metrics) -> None:
    async with opened(server.url, metrics) as store, Redis.from_url(server.url) as redis:
        await store.put(KEY, VALUE)

        assert await store.get(KEY) == VALUE
        assert await store.get(OTHER) is None
        assert 0 < await redis.pttl(PREFIX + KEY) <= 60_000
        assert counted(metrics) == (0, 0)


async def test_clear_leaves_what_others_keep_and_says_why_it_fails(server: RedisServer, folder: Path) -> None:
    async with Redis.from_url(server.url) as redis:
        await redis.set("other", "kept")
        await redis.mset({PREFIX + b"%d" % number: b"" for number in range(3000)})  # more than one answer to SCAN
        await redis_store.clear(server.url)
        assert await redis.keys() == [b"other"]
    with pytest.raises(ConnectionError, match=r"none\.sock"):
        await redis_store.clear(f"unix://{folder}/none.sock")


async def test_user_needs_four_commands(server: RedisServer, metrics: Metrics, log: list[CapturedCall]) -> None:
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


async def test_tls_needs_a_trusted_certificate(folder: Path, metrics: Metrics) -> None:
    authority, port = trustme.CA(), free_port()
    certificate = authority.issue_cert("localhost")
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    certificate.private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
    files = [f"--tls-{kind}-file {folder}/server.pem" for kind in ("cert", "key")]
    options = " ".join([*files, f"--tls-ca-cert-file {folder}/ca.pem", f"--tls-port {port}", "--tls-auth-clients no"])
    with redis_server(folder, *options.split()):
        url = f"rediss://localhost:{port}/0"
        async with opened(f"{url}?ssl_ca_certs={folder}/ca.pem", metrics) as store:
            await asyncio.gather(*(store.put(key, VALUE) for key in (KEY, OTHER)))
            assert [await store.get(key) for key in (KEY, OTHER)] == [VALUE, VALUE]
        async with opened(url, metrics) as store:
            assert await store.get(KEY) is None


async def test_the_circuit_opens_and_closes(
    server: RedisServer, metrics: Metrics, log: list[CapturedCall], monkeypatch: pytest.MonkeyPatch
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
    server: RedisServer, metrics: Metrics, monkeypatch: pytest.MonkeyPatch, *, is_late: bool
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


async def test_full_redis_still_answers(folder: Path, metrics: Metrics) -> None:
    with redis_server(folder, "--maxmemory-policy", "noeviction") as server:
        async with opened(server.url, metrics) as store, Redis.from_url(server.url) as redis:
            await store.put(KEY, VALUE)
            await redis.config_set("maxmemory", 1)
            for _ in range(9):
                await store.put(OTHER, VALUE)
                assert await store.get(OTHER) is None
                assert await store.get(KEY) == VALUE

        assert counted(metrics) == (9, 0)


async def test_few_values_are_under_way_at_a_time(server: RedisServer, metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "_SECONDS", 0.02)
    async with opened(server.url, metrics) as store:
        with server.stopped():
            await asyncio.gather(*(store.put(b"%032d" % number, VALUE) for number in range(100)))

    assert counted(metrics) == (16, 0)  # failures at the same time have one cause


async def test_value_has_a_greatest_size_and_replaces_a_foreign_one(server: RedisServer, metrics: Metrics) -> None:
    async with opened(server.url, metrics) as store, Redis.from_url(server.url) as redis:
        await store.put(KEY, bytes(MAX_BYTES))
        await store.put(OTHER, bytes(MAX_BYTES + 1))
        assert await store.get(KEY) == bytes(MAX_BYTES)
        assert await store.get(OTHER) is None
        await redis.set(PREFIX + KEY, bytes(MAX_BYTES + 1))
        assert await store.get(KEY) == bytes(MAX_BYTES)
        await redis.lpush(PREFIX + OTHER, "stranger")
        assert await store.get(OTHER) is None
        await store.put(OTHER, VALUE)
        assert await store.get(OTHER) == VALUE


@pytest.mark.parametrize(
    "answer",
    [
        *(b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x16\x03\x01\x02\x00", b"-\xff\r\n", b"$x\r\n"),
        *(b"$9999999999\r\nx", b":1\r\n", b"*1\r\n*1\r\n", b"%1\r\n+a\r\n"),
    ],
)
async def test_garbage_is_a_miss(answer: bytes, folder: Path, metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "_SECONDS", 0.02)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        writer.close()

    async with (
        await asyncio.start_unix_server(serve, folder / "garbage.sock"),
        opened(f"unix://{folder}/garbage.sock", metrics) as store,
    ):
        assert await store.get(KEY) is None
        await store.put(KEY, VALUE)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:secret@host:port/0",
        "redis://:secret@host/0?no_such_option=1",
        "rediss://:secret@host/0?ssl_ca_certs=/no/such/file",
        "http://:secret@host/",
    ],
)
async def test_url_that_is_not_valid_is_not_shown(url: str, metrics: Metrics) -> None:
    with pytest.raises(ValueError, match="not a URL of a Redis") as raised:
        RedisStore(url, 60, metrics)

    assert "secret" not in "".join(traceback.format_exception(raised.value))


def test_api_does_not_start_with_such_a_url(folder: Path) -> None:
    url = "redis://:secret@host/0?no_such_option=1"
    with pytest.raises(SettingsError, match="NEREID_CACHE: not a URL of a Redis") as raised:
        preflight.require_usable(Settings(cache=url, model_repository=str(folder), triton_home=str(folder / "t")))

    assert "secret" not in str(raised.value)
