"""Whether a caller suffers from another one: its requests served and its latency beside a caller who sends all it can."""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ipaddress import IPv4Address
from pathlib import Path
from tempfile import TemporaryDirectory
from time import sleep
from typing import NamedTuple

import httpx

from app.api.caller.keys import create
from bench.experiments.options import Commands, add_shared
from bench.harness.lineup import DEFAULT, Lineup
from bench.harness.processes import Running, calling
from bench.harness.triton import Triton, fixture_triton
from bench.load.driver import Driver
from bench.load.driver import run as drive
from bench.load.flood import Caller, flood
from bench.load.images import Sample, large_sample, noise, progressive, roboflow_request, unlabelled_samples, varied_samples
from bench.load.outcome import Outcome
from bench.load.target import Target, local_target
from bench.models.repository import YOLO
from bench.report.progress import say
from bench.report.text import number, responses, table

MODELS = ("sim_gpu", "wait_20", YOLO)
SERVED, P50_RATIO, P99_RATIO = 0.98, 6.0, 12.0
"""A row holds if at least this share of B's requests is served, with at most these multiples of B's latency alone."""

_RATE = 3.0  # B's requests per second
_WARM_UP_SECONDS = 2.0
_LEAD_SECONDS = 2.0  # for which the others send before and after B
_PATIENCE_SECONDS = 10.0  # of B
_FIRST_ADDRESS = IPv4Address("127.1.0.1")


class Load(NamedTuple):
    """What the others do while B is measured."""

    note: str
    path: str
    make: Callable[[str, str], bytes]
    """Makes the body that they send, from the credential and the name of the model."""
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
    alone: Outcome
    beside: Outcome
    others: Counter[str]
    """Requests of the others, by result."""
    seconds: float
    """The time for which they sent."""


def _small(*_: str) -> bytes:
    return min((sample.body for sample in varied_samples()), key=len)


def _form(files: list[tuple[str, bytes]], **fields: str) -> bytes:
    return httpx.Request("POST", "http://127.0.0.1", files=files, data=fields).read()


ROWS = {
    "detect": Load("64 clients, small JPEGs", "/detect", _small),
    "photos": Load("64 clients, JPEGs of 12 megapixels", "/detect", lambda *_: large_sample().body),
    "progressive": Load("the same, progressive", "/detect", lambda *_: progressive(large_sample().body)),
    "batches": Load("8 clients, batches of 60 images", "/detect/batch", lambda *_: _form([("images", _small())] * 60), 8),
    "gif": Load("32 clients, GIFs of 12 MB", "/detect", lambda *_: noise("GIF", (2500, 3400)), 32),
    "png": Load("16 clients, PNGs of 40 MB", "/detect", lambda *_: noise("PNG", (4200, 3200, 3)), 16),
    "roboflow": Load(
        "64 clients of Roboflow's interface", "/infer/object_detection", lambda _, model: roboflow_request(_small(), f"{model}/1")
    ),
    "deepstack": Load(
        "64 clients of DeepStack's",
        "/v1/vision/detection",
        lambda credential, _: _form([("image", _small())], api_key=credential),
        key_in_body=True,
    ),
    "uploads": Load("2,100 uploads at 1 kB/s", "/detect", lambda *_: large_sample().body, 2100, bytes_per_second=1000),
    "short": Load("64 clients, timeout_ms=1000", "/detect?timeout_ms=1000", _small),
    "unauthorized": Load("64 clients with a wrong key", "/detect", _small, ids="x"),
    "both": Load("two callers with 64 clients each", "/detect", _small, ids="ac"),
}
"""The rows. Nobody pauses after a rejection."""


def run(options: argparse.Namespace) -> int:
    """Measure B alone and beside the others, in each row."""
    rows: list[Row] = []
    with fixture_triton([options.model]) as triton:
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
    command.add_argument(
        "--only", nargs="+", choices=[*ROWS], default=[*ROWS], help="what the others send; by default each in turn"
    )
    command.add_argument("--model", choices=MODELS, default="sim_gpu", help="model to use")
    add_shared(command, seconds=12.0, workers=2)
    command.set_defaults(run=run)


def describe(rows: Sequence[Row]) -> str:
    """Format a table of rows."""
    head = ("beside", "A answers/s", "served", "p50", "p99", "alone p50", "p99", "p50 ratio", "p99 ratio", "holds")
    notes = [f"{row.name}: A {dict(sorted(row.others.items()))}; B {responses(row.beside)}" for row in rows]
    return "\n".join([table([head, *(_cells(row) for row in rows)]), *notes])


def _cells(row: Row) -> tuple[str, ...]:
    alone, beside = ([side.percentile(percent) if side.correct else float("inf") for percent in (50, 99)] for side in row[1:3])
    ratios = [mine / usual for mine, usual in zip(beside, alone, strict=True)]
    holds = 1 - row.beside.failed >= SERVED and ratios[0] <= P50_RATIO and ratios[1] <= P99_RATIO
    return (
        row.name,
        number(row.others["200"] / row.seconds),
        f"{row.beside.correct}/{row.beside.requests}",
        *map(number, (*beside, *alone, *ratios)),
        "yes" if holds else "NO",
    )


def _measure(name: str, triton: Triton, options: argparse.Namespace) -> Row:
    load, samples = ROWS[name], [Sample("", unlabelled_samples()[0].body, None)]
    with _gateway(triton, options) as (server, credentials):
        others = []
        for place, id_ in enumerate(load.ids, start=1):
            credential = credentials.get(id_, f"{id_}.wrong")
            target = _target(server, load.path, "" if load.key_in_body else credential, place)
            others.append(Caller(target, load.make(credential, options.model), load.clients, load.bytes_per_second))
        b = _target(server, "/detect", credentials["b"], 0)

        def probe(seconds: float) -> Outcome:
            return drive(Driver(b, samples, seconds, patience=_PATIENCE_SECONDS).constant(_RATE))

        probe(_WARM_UP_SECONDS)
        alone = probe(options.seconds)
        seconds = options.seconds + 2 * _LEAD_SECONDS
        with calling(flood, others, seconds) as sent:
            sleep(_LEAD_SECONDS)
            beside = probe(options.seconds)
            return Row(name, alone, beside, sum(map(Counter, sent()), Counter[str]()), seconds)


@contextmanager
def _gateway(triton: Triton, options: argparse.Namespace) -> Iterator[tuple[Running, dict[str, str]]]:
    """Run a gateway that has the keys `a`, `b` and `c`; yield it and their credentials by id."""
    made = {id_: create(id_) for id_ in "abc"}
    with TemporaryDirectory(prefix="nereid-bench-") as folder:
        file = Path(folder) / "keys.toml"
        file.write_text("\n".join(text for _, text in made.values()), encoding="utf-8")
        lineup = Lineup(triton, options.workers, Path(folder), {"NEREID_API_KEYS_FILE": str(file)})
        with lineup.start(lineup.contestant(DEFAULT, options.model)) as server:
            yield server, {id_: credential for id_, (credential, _) in made.items()}


def _target(server: Running, path: str, key: str, place: int) -> Target:
    return local_target(f"{server.url}{path}")._replace(key=key, source=str(_FIRST_ADDRESS + place))
