"""Records, their comparison and the page, on made-up numbers."""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest
from hdrh.histogram import HdrHistogram

from bench import __main__ as command_line
from bench import compare, load, modes, report, results
from bench.load import Outcome
from bench.results import Record, Run, TritonUse


def outcome(milliseconds: Sequence[float], **statuses: int) -> Outcome:
    histogram = HdrHistogram(1, load.LONGEST, 3)
    for value in milliseconds:
        histogram.record_value(round(value * 1e3))
    counted = {name.removeprefix("s"): count for name, count in statuses.items()} or {"200": len(milliseconds)}
    return Outcome(
        seconds=2.0,
        requests=sum(counted.values()),
        statuses=counted,
        latency=histogram.encode().decode(),
        stages={"decode": 2.0, "infer": 5.0, "total": 9.0},
        driver_cpu=0.25,
    )


def run(scale: float = 1.0, **changes: object) -> Run:
    made = Run(
        contestant="nereid",
        mode="full",
        model="yolo11n",
        clients=4,
        outcome=outcome([scale * value for value in range(10, 110)]),
        triton=TritonUse(inferences=100, executions=40, queue_ms=1.5, compute_ms=30.0, batches={"1": 10, "3": 30}),
        cpu_ms={"gateway": 3.0, "triton": 0.5, "stubs": 40.0, "client": 0.25},
    )
    return msgspec.structs.replace(made, figures={}, **changes)


def record(*runs: Run) -> Record:
    return results.record(runs, {"name": "full"})


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path]:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    results.save(before, record(run(), run(clients=16)))
    results.save(after, record(run(0.5), run(contestant="other")))
    return before, after


def contest(**changes: object) -> dict[str, Any]:
    one = {
        "rate": 100.0,
        "p50": 9.0,
        "p99": 20.0,
        "failed": 0.0,
        "cpu_gateway": 3.0,
        "cpu_triton": 0.5,
        "cpu_stubs": 0.1,
        "cpu_client": 0.2,
        "triton": msgspec.to_builtins(run().triton),
        "outcome": msgspec.to_builtins(outcome([5.0, 9.0])),
    }
    entries = [
        {"name": name, "model": "null", "note": "", "rounds": [one | {"rate": scale * rate} for rate in (90.0, 100.0, 130.0)]}
        for name, scale in (("reference", 1), ("nereid", 3.5))
    ]
    return {"title": "null, 32 clients", "clients": 32, "workers": 2, "entries": entries} | changes


class Elements(HTMLParser):
    """What a page consists of, and what it would fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.open: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.links += [value or "" for name, value in attributes if name in {"src", "href", "srcset", "data", "action"}]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_record_survives_its_file(saved: tuple[Path, Path]) -> None:
    """Histograms included; the figures are there for programs that know none."""
    read = results.load(saved[0])

    assert [one.key for one in read.runs] == [
        ("nereid", "full", "yolo11n", "4 clients"),
        ("nereid", "full", "yolo11n", "16 clients"),
    ]
    assert read.runs[0].outcome.percentile(50) == pytest.approx(59, rel=0.01)
    assert read.machine.cores >= 1
    figures = msgspec.json.decode(saved[0].read_bytes())["runs"][0]["figures"]
    assert figures["requests/s"] == 50
    assert figures["p50"] <= figures["p90"] <= figures["p95"] <= figures["p99"] <= figures["max"]
    assert figures["mean batch"] == 2.5


@pytest.mark.parametrize("content", [None, b"{}", b"no JSON"], ids=["missing", "other", "broken"])
def test_what_is_no_record_is_one_line(content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither compare nor report ends in a traceback."""
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)

    assert compare.report(path, path) == report.report([path], tmp_path / "page.html") == 1
    assert [str(path) in line for line in capsys.readouterr().err.splitlines()] == [True, True]


def test_compare_sets_like_against_like(saved: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Deltas of the run that both have, with their direction; the others are named."""
    assert compare.report(*saved) == 0
    said = capsys.readouterr().out

    assert re.search(r"^mean +59\.5 +29\.8 +-50\.\d % +better$", said, re.MULTILINE)
    assert re.search(r"^requests/s +50\.0 +50\.0 +=", said, re.MULTILINE)
    assert "only in the first: nereid, full, 16 clients, yolo11n" in said
    assert "only in the second: other, full, 4 clients, yolo11n" in said


def test_compare_knows_what_is_better() -> None:
    """More throughput is, more latency is not; errors out of nothing are worse; other machines are pointed out."""
    before, after = record(run()), record(run(2, outcome=outcome([20.0] * 150, s200=150, s503=50)))
    after.machine = msgspec.structs.replace(after.machine, cores=before.machine.cores + 1)
    said = compare.to_text(before, after)

    assert re.search(r"^requests/s +50\.0 +75\.0 +\+50\.0 % +better$", said, re.MULTILINE)
    assert re.search(r"^errors % +0\.00 +25\.0 +\+25\.0 +worse$", said, re.MULTILINE)
    assert "NOT THE SAME MACHINE" in said


def test_the_page_is_whole_and_needs_nothing_else(saved: tuple[Path, Path], tmp_path: Path) -> None:
    """Well-formed, every plot in it, no scripts and nothing that a browser would fetch."""
    assert report.report(saved, tmp_path / "page.html") == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    elements = Elements(page)

    assert not elements.open
    assert not elements.links
    assert "script" not in elements.names
    assert "url(" not in page
    assert "@import" not in page
    assert "prefers-color-scheme: dark" in page
    for title in ("Numbers", "Latency", "Throughput over clients", "Stages", "CPU per request", "Batch sizes"):
        assert f"<h2>{title}</h2>" in page
    assert page.count('<polyline points="') >= 4
    assert "nan" not in re.sub(r"<title>.*?</title>", "", page)


def test_the_page_draws_contests() -> None:
    """A file of `versus` gives throughput with its ratio, cost, stages and batches of each contestant."""
    held = results.record([run(mode="versus: null")], {"contests": [contest(left_out={"broken": "it is <broken>"})]})
    page = report.page([("versus", held)])

    assert not Elements(page).open
    assert "350/s, 3.50 x" in page
    assert "broken was left out: it is &lt;broken&gt;" in page
    assert page.count("<circle") == 6
    assert page.count("<polyline") == 2
    assert "reference: mean 2.50" in page
    assert "<h2>Numbers</h2>" not in page


def test_names_cannot_break_the_page() -> None:
    """A label of the command line is text."""
    page = report.page([("a&b", record(run(contestant="<script>alert(1)</script>"), run(contestant="b")))])

    assert "<script" not in page
    assert not Elements(page).open


def test_a_run_without_answers_can_be_drawn_and_compared() -> None:
    """Nothing divides by the zero of a server that answered nothing."""
    dead = run(outcome=outcome([], error=10), triton=None, triton_note="gone", cpu_ms={})
    page = report.page([("dead", record(dead))])

    assert not Elements(page).open
    assert "100" in page
    assert compare.to_text(record(dead), record(dead))
    assert "100.00%" in modes.sheet(dead)
    assert "- (gone)" in modes.sheet(dead)
    assert "gone" in modes.overview([dead])


def test_the_sheet_tells_everything() -> None:
    """What the issue asks of the table at the end of a run."""
    said = modes.sheet(run())

    for part in ("requests/s", "mean", "p50", "p90", "p95", "p99", "max", "error rate", "200: 100", "decode 2.00", "gateway 3.00"):
        assert part in said
    assert "mean batch 2.50 (1: 10, 3: 30), queue 1.50 ms" in said


class Everything(BaseHTTPRequestHandler):
    """Nereid and Triton's statistics in one server; each request is a batch of two that waited 3 ms."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet
    counted = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        type(self).counted += 1
        self._say(b'{"detections":[{"class_name":"cat"}]}')

    def do_GET(self) -> None:
        count = self.counted
        times = {
            part: {"count": count, "ns": count * 1_000_000}
            for part in ("compute_input", "compute_infer", "compute_output", "success")
        }
        stats = {
            "inference_count": 2 * count,
            "execution_count": count,
            "inference_stats": times | {"queue": {"count": 2 * count, "ns": 2 * count * 3_000_000}},
            "batch_stats": [{"batch_size": 2, "compute_infer": {"count": count}}],
        }
        self._say(msgspec.json.encode({"model_stats": [stats]}) if self.path == "/v2/models/yolo11n/stats" else b"{}")

    def _say(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    request_queue_size = 64


@pytest.fixture
def url() -> Iterator[str]:
    Everything.counted = 0
    server = Server(("127.0.0.1", 0), Everything)
    thread = Thread(target=partial(server.serve_forever, poll_interval=0.01))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


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
    """From the command line to the file, with what Triton did in the meantime and nothing from before."""
    monkeypatch.setattr(modes, "SWEEP", (1, 3))
    monkeypatch.setattr(modes, "MOST_CLIENTS", 4)
    monkeypatch.setattr(modes, "WARM_UP_SECONDS", 0.05)
    file = tmp_path / "out.json"
    image = str(Path(__file__).parent / "pictures" / "chelsea.jpg")
    monkeypatch.setattr("sys.argv", ["bench", *mode, "--url", url, "--triton", url, "--image", image, "--json", str(file)])

    assert command_line.main() == 0
    runs = results.load(file).runs
    assert all(run.mode == mode[0] and run.outcome.failed == 0 for run in runs)
    for one in runs:
        assert one.triton == TritonUse(
            inferences=2 * one.outcome.requests,
            executions=one.outcome.requests,
            queue_ms=3.0,
            compute_ms=3.0,
            batches={"2": one.outcome.requests},
        )
        assert set(one.cpu_ms) >= {"gateway", "client"}
    assert "requests/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("url", "said"),
    [("http://127.0.0.1:1", "nobody listens"), ("http://10.1.2.3", "this machine alone")],
    ids=["nobody", "elsewhere"],
)
def test_what_the_caller_can_mend_is_one_line(
    url: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No traceback, and not the exit status of a good run."""
    monkeypatch.setattr("sys.argv", ["bench", "quick", "--url", url])

    assert command_line.main() == 1
    assert said in capsys.readouterr().err
