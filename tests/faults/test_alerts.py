"""Each alert, set off by a real fault in front of a real Prometheus.

All times in the rules are divided by 12, so that 5 minutes take 25 seconds; thresholds are those that are shipped.
"""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import pytest

from app.api.caller import keys
from app.triton import shared_memory
from bench.harness.triton import embedded_triton
from tests import prometheus as prometheus_module
from tests.faults import models
from tests.faults.exchange import encode
from tests.faults.serving import WORKERS, serving
from tests.faults.test_failing_triton import stopped
from tests.faults.test_several_tritons import successor
from tests.faults.watching import PATIENCE_SECONDS, SCRAPE_SECONDS, Watched, asking, write_models, write_short_rules
from tests.processes import wait_until_gone
from tests.programs import require_program
from tests.prometheus import running_prometheus
from tests.support import free_port

_IMAGE = models.solid(10, 20, 30)
_GOOD = encode(_IMAGE, Content_Type="image/png")
_NONSENSE = encode(models.solid(120, 0, 0), "/predict/nonsense", Content_Type="image/png")


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    require_program("prometheus", "prometheus")
    folder = tmp_path_factory.mktemp("alerts")
    write_models(folder / "models")
    write_short_rules(folder)
    settings = {"model": "checksum", "log_level": "warning"}
    with (
        embedded_triton(folder / "models", "checksum", ports=free_port()) as triton,
        serving(triton, folder, settings=settings) as gateway,
    ):
        targets = {"nereid": gateway.address, "triton": f"127.0.0.1:{triton.settings.triton_ports + 1}"}
        with running_prometheus(targets, folder, scrape_seconds=SCRAPE_SECONDS, rules=folder) as prometheus:
            yield Watched(gateway, triton, prometheus)
    shared_memory.sweep()  # as `serve` does after a gateway that was killed


async def test_no_alert_fires_for_errors_of_clients(watched: Watched) -> None:
    async with asking(watched.gateway, _GOOD, encode(b"", "/nowhere", "GET"), encode(b"x", "/detect")) as statuses:
        await asyncio.sleep(30)

    assert set(statuses) == {200, 404, 415}

    assert await watched.firing() == set()


async def test_a_few_failures_are_a_ticket(watched: Watched) -> None:
    async with asking(watched.gateway, *[_GOOD] * 49, _NONSENSE) as statuses:
        said = await watched.until_firing("NereidSomeErrors")
        assert "NereidErrors" not in await watched.firing()

    assert set(statuses) == {200, 502}
    assert "of the detections on 127.0.0.1 failed" in said["description"]


async def test_failures_are_a_page(watched: Watched) -> None:
    async with asking(watched.gateway, *[_GOOD] * 9, _NONSENSE):
        said = await watched.until_firing("NereidErrors")
    await watched.until_silent("NereidErrors")

    assert re.search(r"failed, \d+ with status 502\. Rejected ones", said["description"])


async def test_missed_deadlines_are_a_page(watched: Watched) -> None:
    late = encode(_IMAGE, "/predict/wait_20?timeout_ms=20", Content_Type="image/png")
    async with asking(watched.gateway, *[_GOOD] * 9, late, every=0.1) as statuses:
        said = await watched.until_firing("NereidErrors")
    await watched.until_silent("NereidErrors")

    assert set(statuses) == {200, 504}
    assert "with status 504" in said["description"]


async def test_keys_that_are_no_longer_valid_are_a_page(watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of two of three clients are missing in a new file. One that is not valid changes nothing, and is a ticket."""
    camera, table = keys.create("camera")
    operator, operators = keys.create("operator")
    table, operators = f"{table}\n", operators.replace('["detect"]', '["detect", "health"]')
    (file := tmp_path / "keys.toml").write_text(table + operators, encoding="utf-8")
    adapt = prometheus_module.adapt

    def adapt_with_key(*arguments: Any) -> bytes:  # noqa: ANN401 - as they are
        config = msgspec.json.decode(adapt(*arguments))
        config["scrape_configs"][0]["authorization"] = {"credentials": operator}
        return msgspec.json.encode(config)

    monkeypatch.setattr(prometheus_module, "adapt", adapt_with_key)
    write_short_rules(tmp_path)
    settings = {"model": "checksum", "log_level": "warning", "api_keys_file": file}
    with serving(watched.triton, tmp_path, settings=settings) as gateway:
        targets = {"nereid": gateway.address, "triton": f"127.0.0.1:{watched.triton.settings.triton_ports + 1}"}
        with running_prometheus(targets, tmp_path, scrape_seconds=SCRAPE_SECONDS, rules=tmp_path) as prometheus:
            here = Watched(gateway, watched.triton, prometheus)
            asked = [encode(_IMAGE, Content_Type="image/png", X_Api_Key=key) for key in (camera, camera, operator)]
            async with asking(gateway, *asked) as statuses:
                file.write_text("", encoding="utf-8")
                refused = await here.until_firing("NereidFileRefused")
                assert set(statuses) == {200}
                file.write_text(operators, encoding="utf-8")
                said = await here.until_firing("NereidUnauthorized")
                file.write_text(table + operators, encoding="utf-8")
                await here.until_silent("NereidUnauthorized", "NereidFileRefused")

    assert set(statuses) == {200, 401}
    assert "have been refused with status 401, now 6" in said["description"]
    assert refused["summary"] == "The file api_keys of Nereid on 127.0.0.1 is not valid"


async def test_a_database_of_search_that_is_away_is_a_page(watched: Watched, tmp_path: Path) -> None:
    write_short_rules(tmp_path)
    nobody = f"postgresql://nereid@127.0.0.1:{free_port()}/nereid"
    settings = {"model": "checksum", "log_level": "warning", "search": "on", "database_url": nobody}
    with serving(watched.triton, tmp_path, settings=settings) as gateway:
        targets = {"nereid": gateway.address, "triton": f"127.0.0.1:{watched.triton.settings.triton_ports + 1}"}
        with running_prometheus(targets, tmp_path, scrape_seconds=SCRAPE_SECONDS, rules=tmp_path) as prometheus:
            here = Watched(gateway, watched.triton, prometheus)
            async with asking(gateway, *[_GOOD] * 30, encode(b"", "/query/stats", "GET")) as statuses:
                said = await here.until_firing("NereidSearchDown")

    assert set(statuses) == {200, 503}
    assert said["summary"] == "Search on 127.0.0.1 does not work"


async def test_a_missing_default_model_is_a_page(watched: Watched, tmp_path: Path) -> None:
    """Triton answers, and nothing counts as a failure; a load balancer asks, and sends no requests."""
    write_short_rules(tmp_path)
    settings = {"model": "nowhere", "log_level": "warning"}
    with serving(watched.triton, tmp_path, settings=settings, ready="/livez") as gateway:
        targets = {"nereid": gateway.address, "triton": f"127.0.0.1:{watched.triton.settings.triton_ports + 1}"}
        with running_prometheus(targets, tmp_path, scrape_seconds=SCRAPE_SECONDS, rules=tmp_path) as prometheus:
            here = Watched(gateway, watched.triton, prometheus)
            async with asking(gateway, encode(b"", "/readyz", "GET"), _GOOD, every=0.5) as statuses:
                await here.until_firing("NereidNotReady")
                firing = await here.firing()

    assert set(statuses) == {404, 503}
    assert firing == {"NereidNotReady"}


async def test_slow_answers_are_a_page(watched: Watched) -> None:
    slow = encode(_IMAGE, "/predict/wait_3000", Content_Type="image/png")
    async with asking(watched.gateway, slow, every=3.5) as statuses:
        said = await watched.until_firing("NereidSlow")

    assert set(statuses) == {200}
    assert "although the gateway is not full" in said["description"]


async def test_a_full_gateway_is_a_ticket(watched: Watched) -> None:
    """Five times what the model can answer; nobody is woken, although those that are admitted wait."""
    too_many = encode(_IMAGE, "/predict/wait_20", Content_Type="image/png")
    await watched.until_silent("NereidSlow")
    async with asking(watched.gateway, too_many, every=0.01) as statuses:
        said = await watched.until_firing("NereidFull")
        firing = await watched.firing()
    await watched.until_silent("NereidFull")

    assert set(statuses) == {200, 429}
    assert not firing & {"NereidErrors", "NereidSlow"}
    assert re.search(r"now [\d.]+%(, \w+ [\d.]+m?/s)+\. The others", said["description"])


async def test_a_model_that_hangs_is_a_ticket(watched: Watched) -> None:
    asked = encode(_IMAGE, "/predict/faulty?timeout_ms=500", Content_Type="image/png")
    hang = watched.triton.repository / "faulty" / "1" / "hang"
    hang.touch()
    async with asking(watched.gateway, *[_GOOD] * 4, asked):
        said = await watched.until_firing("NereidModelFailing")
    hang.unlink()
    await watched.until_silent("NereidModelFailing")

    assert "Triton does not run the model faulty" in said["summary"]
    assert "NereidTritonDown" not in await watched.firing()


async def test_a_triton_that_answers_wrongly_is_a_ticket(watched: Watched) -> None:
    wrong = watched.triton.repository / "faulty" / "1" / "wrong"
    async with asking(watched.gateway, *[_GOOD] * 4, encode(_IMAGE, "/predict/faulty", Content_Type="image/png")) as statuses:
        wrong.touch()
        said = await watched.until_firing("NereidWrongAnswers")
        wrong.unlink()
        await watched.until_silent("NereidWrongAnswers")

    assert set(statuses) == {200, 503}
    assert "answers wrongly for the model faulty" in said["summary"]


async def test_workers_that_nobody_replaces_are_a_ticket(watched: Watched) -> None:
    """The main process hangs, and `serve` does not watch it here."""
    async with stopped(watched.gateway.process):
        watched.gateway.workers()[0].kill()
        said = await watched.until_firing("NereidWorkersMissing")
    await watched.until_silent("NereidWorkersMissing")

    assert f"than should, now {WORKERS - 1}." in said["description"]


async def test_workers_that_die_are_a_ticket(watched: Watched) -> None:
    killed = 0
    end = monotonic() + PATIENCE_SECONDS
    while "NereidWorkersDying" not in await watched.firing():
        assert monotonic() < end
        if len(workers := watched.gateway.workers()) == WORKERS:
            workers[0].kill()
            killed += 1
        await asyncio.sleep(6)  # sooner, no worker would serve, and the API would end

    assert killed > 5


async def test_failure_of_one_triton_or_gateway_of_several_is_a_ticket(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That Prometheus has lost them all is a page."""
    adapt, targets = prometheus_module.adapt, tmp_path / "targets.json"

    def adapt_with_file(*arguments: Any) -> bytes:  # noqa: ANN401 - as they are
        config = msgspec.json.decode(adapt(*arguments))
        del config["scrape_configs"][0]["static_configs"]
        config["scrape_configs"][0]["file_sd_configs"] = [{"files": [str(targets)]}]
        return msgspec.json.encode(config)

    monkeypatch.setattr(prometheus_module, "adapt", adapt_with_file)
    write_short_rules(tmp_path)
    nobody = f"127.0.0.1:{free_port()}"
    settings = {"model": "checksum", "log_level": "warning", "triton_endpoints": f"{watched.triton.address},{nobody}"}
    with serving(watched.triton, tmp_path, settings=settings) as gateway:
        addresses = [watched.gateway.address, gateway.address.replace("127.0.0.1", "localhost")]
        targets.write_bytes(msgspec.json.encode([{"targets": addresses}]))
        others = {"nereid": "", "triton": f"127.0.0.1:{watched.triton.settings.triton_ports + 1}"}
        with running_prometheus(others, tmp_path, scrape_seconds=SCRAPE_SECONDS, rules=tmp_path) as prometheus:
            here = Watched(gateway, watched.triton, prometheus)
            triton = await here.until_firing("NereidSomeTritonsDown")
            workers = gateway.workers()
            gateway.process.kill()
            await asyncio.to_thread(wait_until_gone, workers)
            said = await here.until_firing("NereidSomeDown")
            firing = await here.firing()
            targets.write_bytes(b"[]")
            await here.until_firing("NereidNoTargets")

    assert f"the Triton at {nobody} has not answered Nereid on localhost." in triton["description"]
    assert said["summary"] == "Nereid on localhost does not answer, others do"
    assert not firing & {"NereidDown", "NereidTritonDown", "NereidNoTargets"}


async def test_a_triton_that_hangs_is_a_page(watched: Watched) -> None:
    """With traffic, two alerts fire: users get errors, and Triton is the cause."""
    async with stopped(watched.triton.process), asking(watched.gateway, _GOOD) as statuses:
        said = await watched.until_firing("NereidErrors")
        await watched.until_firing("NereidTritonDown")
    await watched.until_silent("NereidErrors", "NereidTritonDown")

    assert set(statuses) <= {200, 503, 504}
    assert "with status 503" in said["description"]


async def test_a_triton_that_has_ended_is_a_page(watched: Watched) -> None:
    watched.triton.process.kill()
    await watched.until_firing("NereidTritonDown")
    assert "NereidErrors" not in await watched.firing()
    with successor(watched.triton) as server:
        await asyncio.to_thread(server.start)
        await watched.until_silent("NereidTritonDown")


async def test_a_gateway_that_has_ended_is_a_page(watched: Watched) -> None:
    workers = watched.gateway.workers()
    watched.gateway.process.kill()
    await asyncio.to_thread(wait_until_gone, workers)
    said = await watched.until_firing("NereidDown")
    await watched.until_silent("NereidTritonDown")

    assert "have failed on 127.0.0.1." in said["description"]
    assert await watched.firing() <= {"NereidDown", "NereidWorkersDying", "NereidSomeErrors"}
