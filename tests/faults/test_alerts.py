"""Each alert, set off by a real fault in front of a real Prometheus.

All times in the rules are divided by 12, so that 5 minutes take 25 seconds; thresholds are those that are shipped.
"""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from itertools import cycle
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import httpx
import msgspec
import psutil
import pytest

from app.api.caller import keys
from app.triton import shared_memory
from bench.harness.triton import Triton, embedded_triton
from bench.models.repository import write_fixture
from tests.faults import models
from tests.faults.exchange import NO_ANSWER, ask, encode
from tests.faults.meanwhile import meanwhile, until
from tests.faults.serving import WORKERS, Gateway, serving, stopped
from tests.processes import PATIENCE_SECONDS, require_program, wait_until_gone
from tests.prometheus import CONFIG, Prometheus, running_prometheus
from tests.support import free_port, read_samples

_FACTOR = 12
_SCRAPE_SECONDS = 2.0
"""The gateway waits one second for a Triton that does not answer, and a scrape may not take longer than its interval."""
_UNITS = {"s": 1, "m": 60, "h": 3600}
_SETTINGS = {"model": "checksum", "log_level": "warning"}


class Watched(NamedTuple):
    """A gateway, its Triton, and the Prometheus that watches them and others in a file."""

    gateway: Gateway
    triton: Triton
    prometheus: Prometheus
    targets: Path
    operator: tuple[str, str]
    """The credential with which Prometheus asks, and its table in a file of keys."""

    def aim(self, *addresses: str) -> None:
        self.targets.write_bytes(msgspec.json.encode([{"targets": addresses}]))

    async def until(self, *alerts: str, silent: Sequence[str] = ()) -> set[str]:
        """Wait until some alerts fire, one after the other, and others do not; return all that fire in the end."""
        firing: set[str] = set()
        for wanted, is_firing in (*((alert, True) for alert in alerts), *((alert, False) for alert in silent)):
            end = monotonic() + PATIENCE_SECONDS
            while (wanted in (firing := set(await asyncio.to_thread(self.prometheus.firing)))) != is_firing:
                assert monotonic() < end, f"{wanted}: {firing}"
                await asyncio.sleep(_SCRAPE_SECONDS / 2)
        return firing


def shorten(duration: str) -> str:
    return f"{int(duration[:-1]) * _UNITS[duration[-1]] * 1000 // _FACTOR}ms"


def write_short_rules(folder: Path) -> None:
    """Write copies of the alert rules with shorter times."""
    for name in ("recordings.yml", "alerts.yml"):
        file = msgspec.yaml.decode((CONFIG.parent / name).read_bytes())
        for rule in (rule for group in file["groups"] for rule in group["rules"]):
            rule["expr"] = re.sub(r"(?<=\[)\d+[smh](?=\])", lambda found: shorten(found[0]), rule["expr"])
            if "for" in rule:
                rule["for"] = shorten(rule["for"])
        (folder / name).write_bytes(msgspec.json.encode(file))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    require_program("prometheus", "prometheus")
    folder = tmp_path_factory.mktemp("alerts")
    models.write(folder / "models")
    write_fixture("wait_20", folder / "models")
    write_short_rules(folder)
    credential, table = keys.create("operator")
    operator = credential, table.replace('["detect"]', '["detect", "search", "health"]') + "\n"
    job = {
        "static_configs": [],
        "file_sd_configs": [{"files": [str(folder / "targets.json")]}],
        "authorization": {"credentials": credential},
    }
    with (
        embedded_triton(folder / "models", "checksum", ports=free_port()) as triton,
        serving(triton, folder, settings=_SETTINGS) as gateway,
    ):
        others = {"nereid": "", "triton": f"127.0.0.1:{triton.settings.triton_ports + 1}"}
        with running_prometheus(others, folder, scrape_seconds=_SCRAPE_SECONDS, rules=folder, nereid=job) as prometheus:
            made = Watched(gateway, triton, prometheus, folder / "targets.json", operator)
            made.aim(gateway.address)
            yield made
    shared_memory.sweep()  # as `serve` does after a gateway that was killed


@asynccontextmanager
async def asking(gateway: Gateway, *requests: bytes, every: float = 0.05) -> AsyncIterator[Counter[int]]:
    """Send requests in turn during a block, without waiting for answers; count their statuses."""
    statuses: Counter[int] = Counter()
    asked: set[asyncio.Task[None]] = set()

    async def count(request: bytes) -> None:
        try:
            statuses[(await ask(gateway.url, request)).status] += 1
        except ConnectionError:
            statuses[NO_ANSWER] += 1

    async def send() -> None:
        for request in cycle(requests):
            asked.add(task := asyncio.create_task(count(request)))
            task.add_done_callback(asked.discard)
            await asyncio.sleep(every)

    async with meanwhile(send()):
        yield statuses
    await asyncio.gather(*asked)
    assert 500 not in statuses


def detect(path: str = "/detect", colour: tuple[int, int, int] = (10, 20, 30), **headers: str) -> bytes:
    return encode(models.solid(*colour), path, Content_Type="image/png", **headers)


class Fault(NamedTuple):
    """What callers ask in turn, how often, what is broken meanwhile, and what follows; promtool compares what alerts say."""

    asked: Sequence[bytes]
    alert: str
    statuses: set[int]
    """Some of the answers; on a busy machine, others may be late or rejected."""
    never: Sequence[str] = ()
    """Alerts that are not to fire."""
    every: float = 0.05
    during: Callable[[Watched], AbstractAsyncContextManager[None]] = lambda _: meanwhile()
    faulty: str = ""
    """How the model `faulty` is meanwhile."""
    also: str = ""
    """Another alert that must fire."""


@asynccontextmanager
async def losing_a_worker(watched: Watched) -> AsyncIterator[None]:
    """Let the main process hang, which `serve` does not watch here."""
    async with stopped(watched.gateway.process):
        watched.gateway.workers()[0].kill()
        yield


def losing_workers(watched: Watched) -> AbstractAsyncContextManager[None]:
    """Kill the oldest worker again and again, each time when all serve: otherwise the API would end."""

    def read(name: str) -> float:
        with suppress(httpx.HTTPError):
            page = httpx.get(f"{watched.gateway.url}/metrics", timeout=PATIENCE_SECONDS, trust_env=False).text
            return read_samples(page).get(name, 0.0)
        return 0.0

    def all_serve(starts: float) -> bool:
        return read("api_worker_starts_total") > starts and read("api_workers") == WORKERS

    async def kill_again() -> None:
        while True:
            starts = await asyncio.to_thread(read, "api_worker_starts_total")
            min(watched.gateway.workers(), key=psutil.Process.create_time).kill()
            await until(partial(all_serve, starts))

    return meanwhile(kill_again())


_GOOD, _FAILING = detect(), detect(colour=models.FAILING)
_OF_CLIENTS = [encode(b"", "/nowhere", "GET"), encode(b"x", "/detect")] * 5
FAULTS = [
    Fault(
        [*[_GOOD] * 39, *_OF_CLIENTS, _FAILING],
        "NereidSomeErrors",
        {200, 404, 415, 502},
        ["NereidErrors"],
    ),
    Fault([*[_GOOD] * 9, _FAILING], "NereidErrors", {200, 502}),
    Fault([detect("/predict/faulty")], "NereidSlow", {200}, every=3.5, faulty="slow"),
    # Five times what the model can answer; nobody is woken, although those that are admitted wait.
    Fault(
        [detect("/predict/wait_20")],
        "NereidFull",
        {200, 429},
        ["NereidErrors", "NereidSlow"],
        every=0.01,
    ),
    Fault(
        [*[_GOOD] * 4, detect("/predict/faulty?timeout_ms=500")],
        "NereidModelFailing",
        {200, 503, 504},
        ["NereidTritonDown"],
        faulty="hang",
    ),
    Fault([*[_GOOD] * 4, detect("/predict/faulty")], "NereidWrongAnswers", {200, 503}, faulty="wrong"),
    Fault([_GOOD], "NereidWorkersMissing", {200}, during=losing_a_worker, every=1),
    Fault([encode(b"", "/livez", "GET")], "NereidWorkersDying", {200}, during=losing_workers),
    Fault(
        [_GOOD],
        "NereidErrors",
        {200, 503},
        during=lambda watched: stopped(watched.triton.process),
        also="NereidTritonDown",
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.alert for fault in FAULTS])
async def test_fault_sets_off_its_alert(watched: Watched, fault: Fault) -> None:
    await watched.until(silent=[fault.alert, *fault.never])
    async with asking(watched.gateway, *fault.asked, every=fault.every) as statuses:
        await until(lambda: statuses)
        async with models.faulty(watched.triton.repository, fault.faulty) if fault.faulty else fault.during(watched):
            firing = await watched.until(fault.alert, fault.also or fault.alert)

    assert firing.isdisjoint(fault.never)
    assert fault.statuses <= set(statuses)


async def test_missing_default_model_is_a_page(watched: Watched, tmp_path: Path) -> None:
    """Triton answers, and nothing counts as a failure; a load balancer asks, and sends no requests."""
    await watched.until(silent=["NereidErrors", "NereidTritonDown"])
    with serving(watched.triton, tmp_path, settings={**_SETTINGS, "model": "nowhere"}, ready="/livez") as gateway:
        watched.aim(gateway.address.replace("127.0.0.1", "localhost"))
        async with asking(gateway, encode(b"", "/readyz", "GET"), _GOOD, every=0.5) as statuses:
            firing = await watched.until("NereidNotReady")

    assert {404, 503} <= set(statuses)
    assert firing.isdisjoint({"NereidErrors", "NereidTritonDown"})


async def test_faults_of_one_gateway_of_several_and_of_both(watched: Watched, tmp_path: Path) -> None:
    """Its file of keys becomes invalid and then lacks a caller, one of its Tritons and its database are away, and it ends."""
    (camera, cameras), (operator, operators) = keys.create("camera"), watched.operator
    (file := tmp_path / "keys.toml").write_text(f"{cameras}\n{operators}", encoding="utf-8")
    nobody = f"127.0.0.1:{free_port()}"
    settings = {
        **_SETTINGS,
        "api_keys_file": file,
        "search": "on",
        "database_url": f"postgresql://nereid@{nobody}/nereid",
        "triton_endpoints": f"{watched.triton.address},{nobody}",
    }
    asked = [detect(X_Api_Key=camera), encode(b"", "/query/stats", "GET", X_Api_Key=operator)] * 2
    with serving(watched.triton, tmp_path, settings=settings) as gateway:
        watched.aim(watched.gateway.address, gateway.address.replace("127.0.0.1", "localhost"))
        async with asking(gateway, *asked, every=0.1) as statuses:
            file.write_text("", encoding="utf-8")
            await watched.until("NereidFileRefused", "NereidSearchDown")
            assert {200, 503} <= set(statuses)
            assert 401 not in statuses
            file.write_text(operators, encoding="utf-8")
            await watched.until("NereidUnauthorized", "NereidSomeTritonsDown")
            file.write_text(f"{cameras}\n{operators}", encoding="utf-8")
            await watched.until(silent=["NereidUnauthorized", "NereidFileRefused"])
        gateway.process.terminate()
        firing = await watched.until("NereidSomeDown")
        workers = watched.gateway.workers()
        watched.gateway.process.kill()
        await asyncio.to_thread(wait_until_gone, workers)
        await watched.until("NereidDown")
        watched.aim()
        await watched.until("NereidNoTargets")

    assert 401 in statuses
    assert not firing & {"NereidDown", "NereidTritonDown", "NereidNoTargets"}
