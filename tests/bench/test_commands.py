"""Each command of the bench in its shortest form, with real servers, models and programs."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from bench.__main__ import main
from bench.experiments import demo, fair, server_load
from bench.harness.environments import LOCUST, PEERS, REFERENCE
from bench.harness.lineup import lineup_of
from bench.harness.processes import ROOT, Running
from bench.load.images import SAMPLE_FOLDER
from bench.report.records import load_record

IMAGE = str(SAMPLE_FOLDER / "chelsea.jpg")


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with lineup_of(["null"], 1) as lineup, lineup.start(lineup.contestant("nereid_inline", "null")) as server:
        yield server


@pytest.mark.parametrize(
    "mode",
    [
        ["full", "--clients", "2", "--duration", "30"],
        ["open", "--rate", "200", "--duration", "30"],
        ["sustained", "--duration", "0.3", "--p99", "60000"],
    ],
    ids=lambda mode: mode[0],
)
def test_running_server_is_loaded(mode: list[str], gateway: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_load, "MAX_CLIENTS", 4)
    file, image = tmp_path / "out.json", tmp_path / "unlabelled.jpg"
    image.write_bytes(Path(IMAGE).read_bytes())

    code = main([*mode, "--url", gateway.url, "--image", str(image), "--requests", "40", "--json", str(file)])
    runs = load_record(file).runs
    assert code == (mode[0] != "sustained" and any(run.outcome.failed for run in runs))
    assert {(run.mode, run.model) for run in runs} == {(mode[0], "null")}
    for run in runs:
        assert {*run.outcome.statuses} <= {"200", "429"}  # on a busy machine the gateway is full
        assert run.outcome.requests <= 40
        assert {"gateway", "client"} <= {*run.cpu_ms}


def test_contest_with_another_checkout_is_compared_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, drawn = tmp_path / "out.json", tmp_path / "page.html"
    options = ["--rounds", "2", "--seconds", "0.3", "--clients", "2", "--workers", "1", "--only", "nereid_shm", "--json", str(file)]

    assert main(["versus", *options, "--before", str(ROOT)]) == 0
    own, before = load_record(file).runs
    assert [(run.contestant, run.model, run.bases) for run in (own, before)] == [
        ("nereid_shm", "null", ["nereid_shm@before"]),
        ("nereid_shm@before", "null", []),
    ]
    for one in own.rounds:
        assert [*one.outcome.statuses] == ["200"]
        assert {*one.cpu_ms} == {"gateway", "triton", "stubs", "client"}
        assert one.triton is not None
        assert one.triton.inferences == one.outcome.requests
    assert own.figures["worker MiB"] > own.figures["unshared MiB"] > 10
    assert re.search(r"nereid_shm / nereid_shm@before: throughput \d\.\d\d x \(.*\), gateway's CPU ", capsys.readouterr().out)

    assert main(["compare", str(file), str(file)]) == main(["report", str(file), "-o", str(drawn)]) == 0
    assert "requests/s" in capsys.readouterr().out
    assert drawn.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.skipif(not REFERENCE.is_installed(), reason=REFERENCE.missing)
def test_reference_is_measured_beside_nereid(capsys: pytest.CaptureFixture[str]) -> None:
    only = ["--only", "reference", "reference_uint8", "nereid_shm"]

    assert main(["versus", "--rounds", "1", "--seconds", "0.3", *only, "--contests", "load", "photo"]) == 0
    assert capsys.readouterr().out.count("nereid_shm / reference_uint8: throughput ") == 2


@pytest.mark.skipif(not PEERS.is_installed(), reason=PEERS.missing)
def test_peers_find_the_same_and_are_compared(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEREID_MODEL_REPOSITORY", str(repository))
    monkeypatch.setattr("bench.experiments.side_by_side.CAPACITY_CLIENTS", (1,))

    servers = ["plain", "litserve", "nereid_same", "plain_openvino", "nereid"]
    assert main(["peers", "--rounds", "1", "--seconds", "0.5", "--only", *servers]) == 0
    printed = capsys.readouterr().out
    for ratio in ("litserve / plain", "nereid_same / plain", "nereid / plain_openvino"):
        assert f"  {ratio}: throughput " in printed


def test_capacity_comes_without_a_name_and_ends_with_the_limit(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEREID_MODEL_REPOSITORY", str(repository))
    monkeypatch.setattr(sys, "argv", ["bench"])
    monkeypatch.setattr("bench.experiments.side_by_side.CAPACITY_CLIENTS", (1,))
    file = tmp_path / "out.json"

    assert main(["capacity", "--seconds", "0.5", "--json", str(file)]) == 0
    first, *others = load_record(file).runs
    assert (first.model, first.load) == ("yolo11n", "1 client")
    assert 50 < first.figures["model's CPU %"] < 100
    assert [run.contestant for run in others] == ["decode alone", "http_only", "http_and_triton", "nereid_shm", "nereid_file"]
    printed = capsys.readouterr().out
    for ratio in ("nereid_shm / decode alone", "nereid_file / http_and_triton"):
        assert f"  {ratio}: throughput " in printed
    assert "./just bench --help lists all experiments" in printed


@pytest.mark.skipif(not PEERS.is_installed(), reason=PEERS.missing)
def test_demo_goes_through_all_phases_with_both_servers(
    networks: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """How many answers are right in time depends on the machine; that none is wrong does not."""
    monkeypatch.setattr(demo, "download", lambda *_: networks["yolo11n"])
    chart = tmp_path / "demo.svg"

    main(["demo", "--seconds", "1", "--write", str(chart)])
    head, _, *lines = capsys.readouterr().out.splitlines()
    rows = [re.split(r"\s{2,}", line) for line in lines[:12]]
    assert [row[:2] for row in rows] == [[phase, server] for phase in demo.PHASES for server in demo.SERVERS]
    assert {row[re.split(r"\s{2,}", head).index("wrong")] for row in rows} == {"0"}
    assert len(ET.parse(chart).findall(".//{*}text")) == 5 + len(demo.PHASES) + 2 * len(rows)  # noqa: S314 - our own


def test_callers_beside_a_flood_are_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(fair, "_LEAD_SECONDS", 0.5)
    monkeypatch.setattr(fair, "_WARM_UP_SECONDS", 0.5)

    assert main(["fair", "--only", "deepstack", "unauthorized", "--seconds", "0.7", "--workers", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["deepstack", "unauthorized"]
    assert "'200': " in lines[4]
    assert re.fullmatch(r"unauthorized: A \{'401': \d+\}; B 200: 2", lines[5])


@pytest.mark.skipif(os.geteuid() != 0, reason="py-spy needs root, or kernel.yama.ptrace_scope = 0")
def test_worker_is_recorded_under_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.svg"
    assert main(["profile", "1", str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: one of 2 workers of nereid_shm, ")
    assert "<svg" in out.read_text()


@pytest.mark.skipif(not LOCUST.is_installed(), reason=LOCUST.missing)
def test_locust_sends_its_tasks(gateway: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["locust", "--url", gateway.url, "--seconds", "1", "--image", IMAGE, "--tasks", "detect"]) == 0
    assert re.search(r"^/detect .* 0 of \d+$", capsys.readouterr().out, re.MULTILINE)
