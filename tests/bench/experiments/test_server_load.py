"""The ways to load a running server, against a server that stands for Nereid and Triton."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceServicer, add_GRPCInferenceServiceServicer_to_server

from bench.__main__ import main
from bench.experiments import server_load
from bench.experiments.search import find_best
from bench.experiments.server_load import MAX_CLIENTS
from bench.load.images import SAMPLE_FOLDER
from bench.report.measurements import TritonUse
from bench.report.records import load_record

NAMED = b'{"detections":[{"class_name":"cat"}],"model":{"name":"yolox_nano"}}'
UNNAMED = b'{"detections":[{"class_name":"cat"}]}'


class Everything(BaseHTTPRequestHandler):
    """Nereid, and Triton's statistics over gRPC; each request is a batch of two that waited 3 ms."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet
    counted = 0
    answer = NAMED

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        type(self).counted += 1
        self._send(self.answer)

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None: ...


class Statistics(GRPCInferenceServiceServicer):  # type: ignore[misc]  # generated code has no types
    def ModelStatistics(self, request: Any, context: grpc.ServicerContext) -> messages.ModelStatisticsResponse:  # noqa: ANN401, N802
        if request.name != "yolox_nano":
            context.abort(grpc.StatusCode.NOT_FOUND, "unknown model")
        count = Everything.counted
        answer = messages.ModelStatisticsResponse()
        stats = answer.model_stats.add(inference_count=2 * count, execution_count=count)
        for part in ("compute_input", "compute_infer", "compute_output", "success"):
            getattr(stats.inference_stats, part).MergeFrom(messages.StatisticDuration(count=count, ns=count * 1_000_000))
        stats.inference_stats.queue.MergeFrom(messages.StatisticDuration(count=2 * count, ns=2 * count * 3_000_000))
        stats.batch_stats.add(batch_size=2).compute_infer.count = count
        return answer


class Server(ThreadingHTTPServer):
    request_queue_size = 1024  # the open loop connects 256 at once


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(server_load, "WARM_UP_SECONDS", 0.05)
    monkeypatch.setattr(Everything, "counted", 0)
    server = Server(("127.0.0.1", 0), Everything)
    thread = Thread(target=partial(server.serve_forever, poll_interval=0.01))
    thread.start()
    triton = grpc.server(ThreadPoolExecutor(1))
    add_GRPCInferenceServiceServicer_to_server(Statistics(), triton)
    port = triton.add_insecure_port("127.0.0.1:0")
    triton.start()
    monkeypatch.setenv("NEREID_TRITON_ENDPOINTS", f"127.0.0.1:{port}")
    yield f"http://127.0.0.1:{server.server_port}"
    triton.stop(None).wait()
    server.shutdown()
    server.server_close()
    thread.join()


def command(mode: list[str], url: str, file: Path) -> list[str]:
    return [*mode, "--url", url, "--image", str(SAMPLE_FOLDER / "chelsea.jpg"), "--json", str(file)]


@pytest.mark.parametrize(
    "mode",
    [
        ["quick", "--requests", "40"],
        ["full", "--clients", "2", "--duration", "30", "--requests", "40"],
        ["open", "--rate", "200", "--duration", "30", "--requests", "40"],
        ["sweep", "--duration", "30", "--requests", "300"],
        ["sustained", "--duration", "30", "--requests", "40", "--p99", "60000"],
    ],
    ids=lambda mode: mode[0],
)
def test_every_mode_measures_a_server(
    mode: list[str], url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_load, "SWEEP", (1, 3))
    monkeypatch.setattr(server_load, "MAX_CLIENTS", 4)
    file = tmp_path / "out.json"

    assert main(command(mode, url, file)) == 0
    record = load_record(file)
    assert record.contests == []
    assert record.settings["name"] == mode[0]
    assert all(run.mode == mode[0] and run.model == "yolox_nano" and run.outcome.failed == 0 for run in record.runs)
    for one in record.runs:
        assert one.triton == TritonUse(
            inferences=2 * one.outcome.requests,
            executions=one.outcome.requests,
            queue_ms=3.0,
            compute_ms=3.0,
            batches={"2": one.outcome.requests},
        )
        assert set(one.cpu_ms) >= {"gateway", "client"}
    printed = capsys.readouterr().out
    assert "requests/s" in printed
    assert "yolox_nano" in printed
    assert "yolo11n" not in printed


@pytest.mark.parametrize(("option", "named"), [(["--model", "yolox_nano"], "yolox_nano"), ([], "-")], ids=["asked for", "unknown"])
def test_a_server_that_does_not_name_its_model_was_asked_for_one(  # noqa: PLR0913, PLR0917
    option: list[str], named: str, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Everything, "answer", UNNAMED)
    file = tmp_path / "out.json"

    assert main(command(["quick", "--requests", "4", *option], url, file)) == 0
    (one,) = load_record(file).runs
    assert one.model == named
    assert (one.triton is None) == (named == "-")
    assert ("the answers do not name the model; name it with --model" in capsys.readouterr().out) == (named == "-")


def test_a_search_has_no_more_runs_than_its_plan() -> None:
    def runs(best: int) -> int:
        tried = []

        def holds(clients: int) -> bool:
            tried.append(clients)
            return True

        find_best(holds, lambda clients: min(clients / best, best / clients), MAX_CLIENTS)
        return len(tried)

    assert max(map(runs, range(1, MAX_CLIENTS + 1))) == server_load.MAX_TRIES


def test_wrong_answers_are_an_exit_code(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Everything, "answer", b'{"detections":[]}')
    file = tmp_path / "out.json"

    assert main(command(["quick", "--requests", "4"], url, file)) == 1
    assert load_record(file).runs[0].outcome.statuses == {"200": 3, "wrong": 1}


@pytest.mark.parametrize(
    ("url", "message"),
    [("http://127.0.0.1:1", "no server listens"), ("http://192.0.2.1", "without --yes")],
    ids=["nobody", "elsewhere"],
)
def test_an_error_that_the_caller_can_correct_is_one_line(url: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quick", "--url", url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
