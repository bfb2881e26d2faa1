"""Prometheus: its configuration, and what it answers."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from bench.harness.errors import ContestantError
from bench.harness.prometheus import CONFIG, Prometheus, Series, adapt, running_prometheus
from tests.bench.support import always, answer, serving
from tests.programs import require_program

TARGETS = {"nereid": "127.0.0.1:1", "triton": "127.0.0.1:2"}


def test_a_configuration_is_adapted() -> None:
    shipped = msgspec.yaml.decode(CONFIG.read_bytes())
    adapted = msgspec.yaml.decode(adapt(CONFIG.read_bytes(), TARGETS, 0.5, Path("/rules")))

    assert adapted["global"]["scrape_interval"] == "500ms"
    assert adapted["rule_files"] == [f"/rules/{name}" for name in shipped["rule_files"]]
    assert [job["static_configs"] for job in adapted["scrape_configs"]] == [[{"targets": [at]}] for at in TARGETS.values()]
    for before, after in zip(shipped["scrape_configs"], adapted["scrape_configs"], strict=True):
        assert after["relabel_configs"] == before["relabel_configs"]


def test_it_answers_queries(tmp_path: Path) -> None:
    """Values now and over time, without those that are not finite; a wrong expression is an error."""
    require_program("prometheus", "prometheus")
    with running_prometheus(TARGETS, tmp_path, scrape_seconds=0.2) as prometheus:
        ((labels, ((now, value),)),) = prometheus.query("vector(3)")
        (over_time,) = prometheus.query_range("vector(time()) < 100", 90, 105, 5)

        assert (labels, value) == ({}, 3.0)
        assert prometheus.query("4")[0].points[0][1] == 4.0
        assert prometheus.query("vector(0) / 0") == [Series({}, [])]
        assert over_time.points == [(90, 90), (95, 95)]
        assert prometheus.query_range("x", now - 10, now, 1) == []
        assert prometheus.firing() == {}
        with pytest.raises(ContestantError, match="parse error"):
            prometheus.query("sum(")


def test_without_prometheus_the_message_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")

    with (
        pytest.raises(ContestantError, match="apt-get install prometheus"),
        running_prometheus(TARGETS, tmp_path, scrape_seconds=1),
    ):
        pass


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nowhere", "http://[", "ftp://127.0.0.1"])
def test_an_address_without_a_prometheus_is_an_error(url: str) -> None:
    with pytest.raises(ContestantError, match="cannot be asked"):
        Prometheus(url).names()


async def test_another_server_is_no_prometheus() -> None:
    async with serving(always(answer(b"<html>", "404 Not Found"))) as other:
        with pytest.raises(ContestantError, match="is no Prometheus: it answers with status 404"):
            await asyncio.to_thread(Prometheus(other.url).names)
