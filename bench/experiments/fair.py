"""Whether a caller suffers from another one: its requests served and its latency beside a caller who sends all it can."""

import argparse
import base64
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path
from tempfile import TemporaryDirectory
from time import sleep
from typing import BinaryIO, NamedTuple, cast

import httpx
import msgspec
import uvloop

from app.api.caller.keys import create
from app.host.processes import die_with_parent
from bench.experiments.options import Commands, add_shared, count, positive
from bench.experiments.progress import say
from bench.harness.lineup import BEFORE, DEFAULT, Lineup
from bench.harness.memory_sampler import MemorySampler
from bench.harness.meters import find_workers
from bench.harness.processes import ROOT, Running, require_checkout
from bench.harness.triton import Triton, fixture_triton
from bench.load.callers import Answers, Caller, Request, probe
from bench.load.images import large_sample, noise, progressive, unlabelled_samples, varied_samples
from bench.models.repository import YOLO
from bench.report.text import number, table

MODELS = ("sim_gpu", "wait_20", "wait_200", YOLO)
SERVED, P50_RATIO, P99_RATIO = 0.98, 6.0, 12.0
"""A row holds if at least this share of B's requests is served, with at most these multiples of B's latency alone."""

_RATE = 3.0  # B's requests per second
_WARM_UP_SECONDS = 2.0
_LEAD_SECONDS = 2.0  # for which the others send before and after B
_BATCH_IMAGES = 60
_FIRST_ADDRESS = IPv4Address("127.1.0.0")


class Load(NamedTuple):
    """What the others do while B is measured."""

    note: str
    make: Callable[[str, str], Request]
    """Makes the request that they send, from the credential and the name of the model."""
    clients: int = 64
    """Number of clients of each caller."""
    ids: str = "a"
    """Ids of the callers' keys, a letter each; the gateway has no key `x`."""
    key_in_body: bool = False
    bytes_per_second: int = 0
    """Speed of an upload; 0 for no limit."""


class Row(NamedTuple):
    """B alone and beside the others."""

    name: str
    alone: Answers
    beside: Answers
    others: Counter[str]
    """Requests of the others, by result."""
    seconds: float
    """The time for which they sent."""


ROWS = {
    "detect": Load("64 clients, small JPEGs", lambda *_: _post("/detect", _small())),
    "photos": Load("64 clients, JPEGs of 12 megapixels", lambda *_: _post("/detect", large_sample().body)),
    "progressive": Load("the same, progressive", lambda *_: _post("/detect", progressive(large_sample().body))),
    "batches": Load(
        "8 clients, batches of 60 images", lambda *_: _form("/detect/batch", [("images", _small())] * _BATCH_IMAGES), clients=8
    ),
    "gif": Load("32 clients, GIFs of 12 MB", lambda *_: _post("/detect", noise("GIF", (2500, 3400))), clients=32),
    "png": Load("16 clients, PNGs of 40 MB", lambda *_: _post("/detect", noise("PNG", (4200, 3200, 3))), clients=16),
    "roboflow": Load("64 clients of Roboflow's interface", lambda _, model: _roboflow(_small(), model)),
    "deepstack": Load(
        "64 clients of DeepStack's",
        lambda credential, _: _form("/v1/vision/detection", [("image", _small())], api_key=credential),
        key_in_body=True,
    ),
    "uploads": Load("2,100 uploads at 1 kB/s", lambda *_: _post("/detect", large_sample().body), 2100, bytes_per_second=1000),
    "short": Load("64 clients, timeout_ms=1000", lambda *_: _post("/detect?timeout_ms=1000", _small())),
    "unauthorized": Load("64 clients with a wrong key", lambda *_: _post("/detect", _small()), ids="x"),
    "both": Load("two callers with 64 clients each", lambda *_: _post("/detect", _small()), ids="ac"),
}
"""The rows. Nobody pauses after a rejection."""


def run(options: argparse.Namespace) -> int:
    """Measure B alone and beside the others, in each row; or count the answers of many equal callers."""
    rows: list[Row] = []
    with fixture_triton({YOLO} & {options.model}) as triton:
        if options.callers:
            print(_share_out(triton, options))
            return 0
        try:
            for name in options.only:
                say(f"{name}: {ROWS[name].note}")
                rows.append(_measure(name, triton, options))
        finally:
            say()
            print(describe(rows))
    print(f"{options.model}, {options.workers} workers, B sends {_RATE:g} requests/s, {options.seconds:g} s per row; times in ms")
    return 0


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("fair", help="what a caller notices of another one who sends all it can")
    command.add_argument("--only", type=_rows, default=list(ROWS), metavar="ROW[,ROW]", help=f"some of {', '.join(ROWS)}")
    command.add_argument("--share", type=positive, help="the share of B's key; by default it has none")
    command.add_argument("--callers", type=count, help="instead: the answers of so many equal callers, relative to their mean")
    command.add_argument("--checkout", type=Path, metavar="PATH", help="measure the gateway of another checkout of this project")
    command.add_argument("--model", choices=MODELS, default="sim_gpu", help="model to use")
    add_shared(command, seconds=12.0, workers=2)
    command.set_defaults(run=run)


def describe(rows: Sequence[Row]) -> str:
    """Format a table of rows."""
    head = ("beside", "A answers/s", "served", "p50", "p99", "alone p50", "p99", "p50 ratio", "p99 ratio", "holds")
    notes = [f"{row.name}: A {_results(row.others)}; B {_results(row.beside.statuses)}" for row in rows]
    return "\n".join([table([head, *(_cells(row) for row in rows)]), *notes])


def _results(statuses: Counter[str]) -> str:
    return ", ".join(f"{times} x {status}" for status, times in sorted(statuses.items())) or "nothing"


def _cells(row: Row) -> tuple[str, ...]:
    alone, beside = ([side.percentile(percent) for percent in (50, 99)] for side in (row.alone, row.beside))
    ratios = [mine / usual for mine, usual in zip(beside, alone, strict=True)]
    holds = row.beside.served >= SERVED and ratios[0] <= P50_RATIO and ratios[1] <= P99_RATIO
    return (
        row.name,
        number(row.others["200"] / row.seconds),
        f"{row.beside.statuses['200']}/{row.beside.statuses.total()}",
        *map(number, (*beside, *alone, *ratios)),
        "yes" if holds else "NO",
    )


def _measure(name: str, triton: Triton, options: argparse.Namespace) -> Row:
    with _gateway(["a", "b", "c"], triton, options) as (server, credentials):
        others = list(_others(ROWS[name], credentials, options.model))
        b = Caller(_post("/detect", unlabelled_samples()[0].body), credentials["b"], _address(0))
        uvloop.run(probe(server.url, b, _RATE, _WARM_UP_SECONDS))
        alone = uvloop.run(probe(server.url, b, _RATE, options.seconds))
        seconds = options.seconds + 2 * _LEAD_SECONDS
        with _flood(server, others, seconds) as sent:
            sleep(_LEAD_SECONDS)
            beside = uvloop.run(probe(server.url, b, _RATE, options.seconds))
            return Row(name, alone, beside, sum(sent(), Counter()), seconds)


def _share_out(triton: Triton, options: argparse.Namespace) -> str:
    ids = [f"caller-{place}" for place in range(options.callers)]
    with _gateway(ids, triton, options) as (server, credentials):
        request = _post("/detect", _small())
        callers = [Caller(request, credentials[id_], _address(place)) for place, id_ in enumerate(ids)]
        with (
            _flood(server, callers, options.seconds) as sent,
            MemorySampler(find_workers(server.process, options.workers)) as memory,
        ):
            found = sent()
    answers = [one["200"] for one in found]
    mean = sum(answers) / len(answers) or 1
    mib = [sum(worker.resident_mib[place] for worker in memory.series) for place in (len(memory.series[0].seconds) // 2, -1)]
    return (
        f"{options.callers} callers, {number(sum(answers) / options.seconds)} answers/s; per caller, relative to the mean:"
        f" least {min(answers) / mean:.2f}, most {max(answers) / mean:.2f}; {dict(sum(found, Counter()))};"
        f" memory of the workers {number(mib[0])} MiB after half of the time, {number(mib[1])} at the end"
    )


@contextmanager
def _gateway(ids: Sequence[str], triton: Triton, options: argparse.Namespace) -> Iterator[tuple[Running, dict[str, str]]]:
    """Run a gateway that has keys with these ids; yield it and their credentials by id."""
    before = require_checkout(options.checkout) if options.checkout else None
    with TemporaryDirectory(prefix="nereid-bench-") as folder:
        made = {id_: create(id_) for id_ in ids}
        share = {"b": f"\nshare = {options.share}"} if options.share else {}
        file = Path(folder) / "keys.toml"
        file.write_text("\n".join(f"{text}{share.get(id_, '')}" for id_, (_, text) in made.items()), encoding="utf-8")
        settings = {"NEREID_API_KEYS_FILE": str(file)}
        lineup = Lineup(triton, options.workers, Path(folder), settings=settings, before=before)
        with lineup.start(lineup.contestant(f"{DEFAULT}{BEFORE}" if before else DEFAULT, options.model)) as server:
            yield server, {id_: credential for id_, (credential, _) in made.items()}


@contextmanager
def _flood(server: Running, callers: Sequence[Caller], seconds: float) -> Iterator[Callable[[], list[Counter[str]]]]:
    """Start `flood` in a process of its own; yield a function that waits for its results."""
    with subprocess.Popen(
        [sys.executable, "-m", "bench.load.callers"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C must reach only the parent, which stops it
        preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - no threads here
    ) as child:
        arguments, output = cast("BinaryIO", child.stdin), cast("BinaryIO", child.stdout)
        arguments.write(msgspec.msgpack.encode((server.url, callers, seconds)))
        arguments.close()
        output.readline()
        try:
            yield lambda: [Counter(one) for one in msgspec.msgpack.decode(output.read(), type=list[dict[str, int]])]
        finally:
            child.terminate()


def _others(load: Load, credentials: dict[str, str], model: str) -> Iterator[Caller]:
    """Describe those who send all they can in a row."""
    for place, id_ in enumerate(load.ids, start=1):
        credential = credentials.get(id_, f"{id_}.wrong")
        header = "" if load.key_in_body else credential
        yield Caller(load.make(credential, model), header, _address(place), load.clients, load.bytes_per_second)


def _address(place: int) -> str:
    return str(_FIRST_ADDRESS + 1 + place)


def _post(path: str, body: bytes, kind: str = "application/octet-stream") -> Request:
    return Request(path, {"content-type": kind, "content-length": str(len(body))}, body)


def _form(path: str, files: list[tuple[str, bytes]], **fields: str) -> Request:
    made = httpx.Request("POST", f"http://127.0.0.1{path}", files=files, data=fields)
    return _post(path, made.read(), made.headers["content-type"])


def _batch() -> Request:
    return _form("/detect/batch", [("images", _small())] * _BATCH_IMAGES)


def _deepstack(credential: str) -> Request:
    return _form("/v1/vision/detection", [("image", _small())], api_key=credential)


def _roboflow(jpeg: bytes, model: str) -> Request:
    image = {"type": "base64", "value": base64.b64encode(jpeg).decode()}
    body = msgspec.json.encode({"model_id": f"{model}/1", "image": image, "confidence": 0.4, "iou_threshold": 0.3})
    return _post("/infer/object_detection", body, "application/json")


def _small() -> bytes:
    return min((sample.body for sample in varied_samples()), key=len)


def _rows(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(ROWS):
        raise argparse.ArgumentTypeError(f"there is no row {', '.join(sorted(unknown))}")
    return names
