"""Search on a real PostgreSQL: recall and latency of vectors, growth, filters, and what a search costs beside a vector alone.

The database's part is what `PostgresEngine.nearest` takes, with clients here. Images are added one by one, as POST /ingest
does it, so the index has grown as in production. What is found is compared with an exact search by numpy.
"""

import argparse
import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.search.engine import EVERYTHING, Filter, NewImage, Page, Vector
from app.search.postgres.engine import PostgresEngine
from bench.experiments.options import Commands, add_shared, count
from bench.harness.contest import Case, hold
from bench.harness.lineup import DEFAULT, Lineup
from bench.harness.postgres import embedded_postgres
from bench.harness.triton import embedded_triton
from bench.load.images import SEED, unlabelled_samples
from bench.models.clusters import make_vector
from bench.models.repository import write_embedding, write_fixture
from bench.report.progress import say
from bench.report.text import number, overview, table

RECALL, P50_MS, P99_MS, GROWTH, END_TO_END = 0.95, 15, 50, 2, 1.3
"""What must hold: the least recall, and the most of the others."""

_TOP = 10
_QUERIES = 1600
_WARM_UP = 400
_SMALL = 10
"""The growth is measured from this part of the vectors on."""
_SHARES = {"1 %": 0.01, "10 %": 0.1, "50 %": 0.5}
"""Of the images that a filter leaves."""
_TENANT, _OTHER = "bench", "small"
_OTHER_SHARE = 0.01
_MODEL = "embedding:1"
_VECTOR, _SEARCH = "vector alone", "search"


class Asked(NamedTuple):
    """What the queries of one kind gave."""

    images: int
    seconds: Sequence[float]
    recall: float

    def percentile(self, percent: float) -> float:
        """Milliseconds within which `percent` of the queries were answered."""
        return float(np.percentile(self.seconds, percent)) * 1e3


class Database:
    """A database with vectors, and the questions to it, asked by so many clients at a time."""

    def __init__(self, engine: PostgresEngine, size: int, clients: int) -> None:
        """Make so many vectors."""
        self.vectors = np.stack([make_vector(place) for place in range(size)])
        self.draws = np.random.default_rng(SEED).random(size)
        """A filter leaves the images whose number here is below its share."""
        self._questions = np.stack([make_vector(size + place) for place in range(_QUERIES)])
        self._engine = engine
        self._clients = clients

    async def add(self, tenant: str, images: NDArray[np.intp]) -> float:
        """Add images as POST /ingest does; return how many a second."""
        left = iter(images.tolist())
        started = perf_counter()

        async def add() -> None:
            for image in left:
                if not image % 1000:
                    say(f"{image:,} images are there")
                new = NewImage(
                    image_id=str(image),
                    content_hash=hashlib.sha256(str(image).encode()).digest(),
                    path=f"/images/{image}.jpg",
                    metadata={name: True for name, share in _SHARES.items() if self.draws[image] < share},
                    width=640,
                    height=480,
                    vectors=[Vector(self.vectors[image], _MODEL)],
                )
                await self._engine.add(tenant, new)

        await asyncio.gather(*(add() for _ in range(self._clients)))
        return len(images) / (perf_counter() - started)

    async def ask(self, tenant: str, among: NDArray[np.intp], where: Filter = EVERYTHING) -> Asked:
        """Ask all questions, and compare the answers with those of the exact search among the images that may be found."""
        exact = await asyncio.to_thread(self._nearest, among)
        seconds, recalls = [0.0] * _QUERIES, [0.0] * _QUERIES

        async def ask(places: Iterator[int]) -> None:
            for place in places:
                question = Vector(self._questions[place], _MODEL)
                started = perf_counter()
                hits = await self._engine.nearest(tenant, "global", question, Page(_TOP), where=where)
                seconds[place] = perf_counter() - started
                recalls[place] = len({hit.image_id for hit in hits} & exact[place]) / _TOP

        for questions in (range(_WARM_UP), range(_QUERIES)):
            say(f"asking among {len(among):,} images")
            places = iter(questions)
            await asyncio.gather(*(ask(places) for _ in range(self._clients)))
        return Asked(len(among), seconds, float(np.mean(recalls)))

    def _nearest(self, among: NDArray[np.intp]) -> list[set[str]]:
        """Return for each question the ids of the nearest images."""
        found: list[set[str]] = []
        for part in np.array_split(self._questions, _QUERIES // 100):
            best = np.argpartition(-part @ self.vectors[among].T, min(_TOP, len(among) - 1), axis=1)[:, :_TOP]
            found += [{str(among[place]) for place in row} for row in best]
        return found


def run(options: argparse.Namespace) -> int:
    """Add the vectors and ask; print the tables."""
    with TemporaryDirectory(prefix="nereid-bench-") as folder, embedded_postgres() as postgres:
        asyncio.run(_database_part(postgres.search_database, options))
        models = Path(folder, "models")
        write_fixture("null", models)
        write_embedding(models, options.milliseconds)
        # With much time, none is refused because the machine is slow.
        settings = {"NEREID_SEARCH": "on", "NEREID_DATABASE_URL": postgres.search_database, "NEREID_TIMEOUT_SECONDS": "60"}
        samples = [sample._replace(expected=None) for sample in unlabelled_samples()]
        cases = [
            Case(_VECTOR, samples, options.clients, server=DEFAULT, path="/embed/image"),
            Case(
                _SEARCH, samples, options.clients, server=DEFAULT, path=f"/search/image?top_k={_TOP}&min_score=0", bases=[_VECTOR]
            ),
        ]
        with embedded_triton(models, "null") as triton:
            lineup = Lineup(triton, options.workers, Path(folder), settings)
            vector, search = hold("search", cases, lineup, options.seconds, options.rounds)
    print(f"end to end, {options.workers} workers, a model of {options.milliseconds:g} ms\n{overview([vector, search])}")
    ratio = float(np.median(search.ratios(vector, "p50")))
    print(f"the ratio of p50 is at most {END_TO_END}: {_holds(ratio <= END_TO_END)}")
    return int(bool(vector.outcome.failed or search.outcome.failed))


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("search", help="search on PostgreSQL: recall, latency, growth, filters; and end to end")
    command.add_argument("--vectors", type=count, default=100_000, help="images that are added")
    command.add_argument("--milliseconds", type=float, default=1.0, help="what the model of vectors takes, end to end")
    add_shared(command, clients=8, rounds=5, seconds=4.0, workers=1)
    command.set_defaults(run=run)


async def _database_part(url: str, options: argparse.Namespace) -> None:
    engine = PostgresEngine(url)
    await engine.models("image")
    try:
        database = Database(engine, options.vectors, options.clients)
        everything = np.arange(options.vectors)
        first, rest = np.split(everything, [options.vectors // _SMALL])
        others = np.random.default_rng(SEED).permutation(everything)[: round(options.vectors * _OTHER_SHARE)]
        rates = [await database.add(_TENANT, first)]
        small = await database.ask(_TENANT, first)
        rates.append(await database.add(_TENANT, rest))
        await database.add(_OTHER, others)
        found = {"all": await database.ask(_TENANT, everything)}
        for name, share in _SHARES.items():
            left = np.flatnonzero(database.draws < share)
            found[f"a filter leaves {name}"] = await database.ask(_TENANT, left, Filter(metadata={name: True}))
        found[f"a tenant that has {_OTHER_SHARE:.0%}"] = await database.ask(_OTHER, others)
    finally:
        await engine.close()
    say()
    rows = [_row("a tenth", small), *(_row(name, asked) for name, asked in found.items())]
    print(table([("database's part", "images", f"recall@{_TOP}", "p50 ms", "p99 ms", "holds"), *rows]))
    growth = found["all"].percentile(50) / small.percentile(50)
    print(f"{options.clients} clients, {_QUERIES} questions; p50 grows {growth:.2f} times: {_holds(growth <= GROWTH)}")
    print(f"added one by one by {options.clients} clients: first {rates[0]:.0f}, then {rates[1]:.0f} images a second")


def _row(name: str, asked: Asked) -> tuple[str, ...]:
    p50, p99 = asked.percentile(50), asked.percentile(99)
    holds = asked.recall >= RECALL and (name != "all" or (p50 <= P50_MS and p99 <= P99_MS))
    return name, f"{asked.images:,}", f"{asked.recall:.3f}", number(p50), number(p99), _holds(holds)


def _holds(holds: bool) -> str:  # noqa: FBT001 - what it says
    return "holds" if holds else "does NOT hold"
