"""25 lines of FastAPI and Nereid in turn, with the same network, engine and pictures: alone, and while things go wrong."""

import argparse
import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from io import BytesIO
from itertools import cycle, groupby, islice
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from threading import Timer
from time import perf_counter, sleep
from typing import Any, NamedTuple

import psutil
from PIL import Image

from app.host import program
from app.zoo import registry
from app.zoo.download import download
from bench.experiments.options import Commands, add_shared, new_file
from bench.harness.environments import PEERS
from bench.harness.errors import ContestantError
from bench.harness.lineup import Contestant
from bench.harness.meters import children
from bench.harness.peers import peers_with
from bench.harness.processes import ROOT, Running, calling, environment_of
from bench.load.connection import Response
from bench.load.driver import Driver
from bench.load.driver import run as drive
from bench.load.flood import Caller, flood
from bench.load.images import coco_samples
from bench.load.tally import REJECTIONS
from bench.load.target import Target, local_target
from bench.models.repository import YOLO
from bench.report.page import Shares, draw_shares
from bench.report.progress import say
from bench.report.records import describe_machine
from bench.report.text import number, table

FLOOD, KILL, VERSION, FILES = "beside a flood", "its processes killed", "a new version", "broken and huge files"
PHASES = {"one client": 1, "six clients": 6, FLOOD: 0, KILL: 0, VERSION: 0, FILES: 0}
"""The phases, with the number of clients that send their next picture after each answer; 0 for the polite caller."""
SERVERS = {"FastAPI": "plain", "Nereid": "nereid_same"}
KINDS = ("right", "late", "refused", "failed", "wrong", "lost")
"""What may become of a request. Late: right, after the deadline. Refused: with Retry-After. Failed: another status."""
DEADLINE_SECONDS = 1.0
"""After which an answer is of no use to a caller."""
MIN_SHARE = 0.95
"""Of the polite caller's pictures; what Nereid must answer right and in time."""

_RATE = 4.0  # pictures per second of the polite caller
_FLOOD_CLIENTS = 24
_FILES_RATE = 2.0  # of each kind per second, one after the other
_KILL_AFTER = 0.1  # of a phase
_PATIENCE_SECONDS = 12.0  # more than the gateway's deadline
_READY_SECONDS = 60.0
_POLITE, _OTHER = "127.1.0.1", "127.1.0.2"
_BOMB_SIDE, _HUGE_BYTES = 30_000, 200_000_000
_MODEL = "demo"
_RIGHT = KINDS[:2]
_PARTS = {
    f"right within {DEADLINE_SECONDS:g} s": (2, ["right"]),
    "right, but later": (3, ["late"]),
    "refused with Retry-After": (0, ["refused"]),
    "failed, wrong or no answer": (7, ["failed", "wrong", "lost"]),
}
"""The parts of a row in the chart: colour and kinds."""


class Server(NamedTuple):
    """One of the two."""

    name: str
    contestant: Contestant
    running: Running
    newer: Path
    """Another file of its network."""

    def target(self, source: str) -> Target:
        """Return the target of the caller at an address."""
        return local_target(f"{self.running.url}/detect")._replace(source=source)


class Row(NamedTuple):
    """A server in a phase."""

    phase: str
    server: str
    kinds: Counter[str]
    """Number of requests by kind."""
    rate: float
    """Right answers per second."""
    p99: float
    """Latency of right answers, in milliseconds."""
    note: str
    is_back: bool
    """Whether the last answer was right."""

    @property
    def share(self) -> float:
        """The part of the requests with a right answer in time."""
        return self.kinds["right"] / (self.kinds.total() or 1)

    @property
    def holds(self) -> bool:
        """Whether this is what Nereid must do."""
        is_served = not self.kinds["failed"] if self.phase == KILL else self.share >= MIN_SHARE or PHASES[self.phase] > 0
        return self.is_back and is_served and not self.kinds["wrong"] + self.kinds["lost"]


class _Answer(NamedTuple):
    kind: str
    sent: float
    ended: float
    version: str
    """That of the model, if the answer names it."""


class _Watched(Driver):
    """Checks all answers, and keeps what became of each request."""

    def __init__(self, *load: Any, **options: Any) -> None:  # noqa: ANN401 - those of the driver
        super().__init__(*load, **options)
        self._tally.check_every = 1
        self.answers: list[_Answer] = []

    async def _request(self, number: int, since: float) -> Response | None:
        response, ended = await super()._request(number, since), perf_counter()
        kind, version = "lost", ""
        if response:
            is_refusal = response.status in REJECTIONS and response.retry_after
            kind = {"200": "right", "wrong": "wrong"}.get(response.status, "refused" if is_refusal else "failed")
            version = named[1].decode() if (named := re.search(rb'"version":"(\d+)"', response.body)) else "not named"
        if kind == "right" and ended - since > DEADLINE_SECONDS:
            kind = "late"
        self.answers.append(_Answer(kind, since, ended, version))
        return response


def run(options: argparse.Namespace) -> int:
    """Measure each phase with one server after the other; return 1 if Nereid did not do what it must."""
    began, rows = perf_counter(), list[Row]()
    say("installing what is missing, and starting both")
    with _servers() as servers:
        for phase in PHASES:
            for server in servers:
                say(f"{phase}: {server.name}")
                rows.append(_measure(phase, server, options.seconds * (2 if phase == VERSION else 1)))  # `add` takes its time
    say()
    print(f"{describe(rows)}\n{options.seconds:g} s each, twice that for a new version")
    print(f"{perf_counter() - began:.0f} s in all; {describe_machine()}")
    options.write.write_text(draw(rows), encoding="utf-8")
    print(f"chart: {options.write}")
    missed = [row.phase for row in rows if row.server == "Nereid" and not row.holds]
    print(f"Nereid did not do what it must: {', '.join(missed)}" if missed else "Nereid did what it must")
    return int(bool(missed))


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("demo", help="25 lines of FastAPI and Nereid in turn, while things go well and wrong")
    add_shared(command, seconds=9.0)
    chart = Path(gettempdir(), "nereid-demo.svg")
    command.add_argument("--write", type=new_file, default=chart, metavar="SVG", help=f"file of the chart; by default {chart}")
    command.set_defaults(run=run)


def describe(rows: Sequence[Row]) -> str:
    """Format a table of rows."""
    head = ("phase", "server", "right/s", "in time", "p99, ms", *KINDS[1:], "")
    cells = []
    for row in rows:
        counts = (str(row.kinds[kind]) for kind in KINDS[1:])
        cells.append((row.phase, row.server, number(row.rate), f"{row.share:.1%}", number(row.p99), *counts, row.note))
    about = f"in time: right within {DEADLINE_SECONDS:g} s; refused: with Retry-After; failed: another status; lost: no answer"
    return f"{table([head, *cells])}\n{about}"


def draw(rows: Sequence[Row]) -> str:
    """Draw the chart."""

    def shares(row: Row) -> Shares:
        parts = [sum(row.kinds[kind] for kind in kinds) for _, kinds in _PARTS.values()]
        return row.server, parts, f"{number(row.rate)}/s, p99 {number(row.p99)} ms"

    groups = {phase: [*map(shares, each)] for phase, each in groupby(rows, key=lambda row: row.phase)}
    colours = {text: colour for text, (colour, _) in _PARTS.items()}
    return draw_shares("What callers get of the same network, engine and pictures", colours, groups)


@contextmanager
def _servers() -> Iterator[list[Server]]:
    """Install what is missing, and start both servers with a model of the same network; yield them."""
    with TemporaryDirectory(prefix="nereid-bench-") as folder, ExitStack() as stack:
        with ThreadPoolExecutor(1) as pool:
            installed = pool.submit(PEERS.install)
            network = download(registry.load()[YOLO], Path(folder))
            with _add(network, {"NEREID_MODEL_REPOSITORY": folder, "NEREID_TRITON_HOME": folder}) as added:
                installed.result()
                _finish(added)
        newer = Path(folder, "newer.onnx")
        newer.write_bytes(network.read_bytes() + b"\x32\x05newer")  # protobuf's field doc_string
        peers = stack.enter_context(peers_with(Path(folder, _MODEL), len(os.sched_getaffinity(0))))
        servers = []
        for title, name in SERVERS.items():
            contestant = peers.contestant(name, _MODEL)
            servers.append(Server(title, contestant, stack.enter_context(peers.start(contestant)), newer))
        yield servers


def _add(network: Path, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    command = program.command("app", "add", "--name", _MODEL, str(network))
    return subprocess.Popen(command, env={**environment_of(ROOT), **environment}, stderr=subprocess.PIPE)


def _finish(added: "subprocess.Popen[bytes]") -> None:
    _, errors = added.communicate()
    if added.returncode:
        raise ContestantError(errors.decode().strip())


def _measure(phase: str, server: Server, seconds: float) -> Row:
    """Send the load of a phase while its event happens."""
    _wait_until_right(server)
    load = _Watched(server.target(_POLITE), coco_samples(), seconds, patience=_PATIENCE_SECONDS)
    with _event(phase, server, seconds) as tell:
        clients = PHASES[phase]
        outcome = drive(load.closed(clients, is_polite=True) if clients else load.constant(_RATE))
        answers = sorted(load.answers, key=lambda answer: answer.sent)
        note = tell(answers)
    kinds = Counter(answer.kind for answer in answers)
    return Row(phase, server.name, kinds, outcome.goodput, outcome.percentile(99), note, answers[-1].kind in _RIGHT)


def _wait_until_right(server: Server) -> None:
    until = perf_counter() + _READY_SECONDS
    while perf_counter() < until:
        with suppress(OSError):
            if not drive(Driver(server.target(_POLITE), coco_samples(), 0.3).closed(2)).failed:
                return
        sleep(0.3)
    raise ContestantError(f"{server.name} does not answer any more")


@contextmanager
def _event(phase: str, server: Server, seconds: float) -> Iterator[Callable[[Sequence[_Answer]], str]]:
    """Let happen what a phase is about; yield what waits for its end, and says what came of it."""
    if phase in {FLOOD, FILES}:
        bodies = _files() if phase == FILES else [one.body for one in islice(cycle(coco_samples()), _FLOOD_CLIENTS)]
        rate = _FILES_RATE if phase == FILES else 0.0
        with calling(flood, [Caller(server.target(_OTHER), body, rate=rate) for body in bodies], seconds) as sent:
            yield lambda _: f"the other: {_join(sum(map(Counter, sent()), Counter[str]()))}"
    elif phase == KILL:
        killed = list[float]()
        timer = Timer(_KILL_AFTER * seconds, lambda: killed.append(_kill(server)))
        timer.start()
        yield lambda answers: _recovery(answers, *killed)
    elif phase == VERSION and server.name == "Nereid":
        with _add(server.newer, server.contestant.environment) as added:
            yield _versions
            _finish(added)
    elif phase == VERSION:
        server.running.process.send_signal(signal.SIGHUP)  # uvicorn replaces one worker after the other; they read the file again
        yield _versions
    else:
        yield lambda _: ""


def _versions(answers: Sequence[_Answer]) -> str:
    return f"version {_join(Counter(answer.version for answer in answers if answer.kind in _RIGHT))}"


def _join(counts: Counter[str]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in sorted(counts.items()))


def _recovery(answers: Sequence[_Answer], killed: float) -> str:
    sent = [answer for answer in answers if answer.sent >= killed]
    missed = [place for place, answer in enumerate(sent, 1) if answer.kind not in _RIGHT]
    again = sent[missed[-1] if missed else 0 :]
    return f"right again after {again[0].ended - killed:.1f} s" if again else "not right again"


def _kill(server: Server) -> float:
    """Kill all processes that have loaded the engine, and the Triton that starts them; return when."""
    for process in children(server.running.process):
        with suppress(OSError, psutil.Error):
            if process.name() == "tritonserver" or "onnxruntime" in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8"):
                process.kill()
    return perf_counter()


def _files() -> list[bytes]:
    """Make half a JPEG, a PNG of 900 megapixels in 0.1 MB, and 200 MB that begin as a JPEG."""
    jpeg, png = coco_samples()[0].body, BytesIO()
    Image.new("1", (_BOMB_SIDE, _BOMB_SIDE)).save(png, "PNG")
    return [jpeg[: len(jpeg) // 2], png.getvalue(), jpeg + bytes(_HUGE_BYTES)]
