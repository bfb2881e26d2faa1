"""Search on a real PostgreSQL: recall and latency of vectors, growth, filters, size, and what a search costs beside a vector alone.

The database's part is what `PostgresEngine.nearest` takes, with clients here. Images are added one by one, as POST /ingest
does it, so the index has grown as in production. What is found is compared with an exact search by numpy.
"""

import argparse
import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.search.engine import EVERYTHING, Filter, NewImage, Page, Vector
from app.search.postgres.engine import PostgresEngine
from app.search.postgres.vectors import active, is_small
from bench.experiments.options import Commands, add_shared, count
from bench.experiments.progress import say
from bench.harness.contest import Load, measure
from bench.harness.errors import ContestantError
from bench.harness.lineup import Lineup
from bench.harness.meters import MIB
from bench.harness.postgres import Postgres, embedded_postgres
from bench.harness.triton import Triton, embedded_triton
from bench.load.images import unlabelled_samples
from bench.models.clusters import make_vector
from bench.models.repository import write_embedding, write_fixture
from bench.report.measurements import Measurement
from bench.report.text import number, table

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
_PATHS = {"vector alone": "/embed/image", "search": f"/search/image?top_k={_TOP}&min_score=0"}
_SEED = 4603
_VECTOR = re.compile(r"'\[[^']*\]'::\w+")


class Asked(NamedTuple):
    """What the queries of one kind gave."""

    seconds: Sequence[float]
    recall: float
    uses_hnsw: bool

    def percentile(self, percent: float) -> float:
        """Milliseconds within which `percent` of the queries were answered."""
        return float(np.percentile(self.seconds, percent)) * 1e3


class Kind(NamedTuple):
    """A kind of question."""

    tenant: str
    among: NDArray[np.intp]
    """The images that may be found."""
    where: Filter = EVERYTHING


class Vectors:
    """The vectors of a run, and the questions."""

    def __init__(self, size: int) -> None:
        """Make so many vectors."""
        self.all = np.stack([make_vector(number_) for number_ in range(size)])
        source = np.random.default_rng(_SEED)
        self.draws = source.random(size)
        """A filter leaves the images whose number here is below its share."""
        self.others = source.permutation(size)[: round(size * _OTHER_SHARE)]
        """Those that another tenant has, too."""
        self.questions = np.stack([make_vector(size + number_) for number_ in range(_QUERIES)])

    def nearest(self, among: NDArray[np.intp]) -> list[set[str]]:
        """Return for each question the ids of the nearest images."""
        found: list[set[str]] = []
        for part in np.array_split(self.questions, max(1, _QUERIES // 100)):
            scores = part @ self.all[among].T
            best = np.argpartition(-scores, _TOP, axis=1)[:, :_TOP]
            found += [{_id(among[place]) for place in row} for row in best]
        return found


def run(options: argparse.Namespace) -> int:
    """Add the vectors and ask; print the table, the sizes, and the plan of the slowest question."""
    vectors = Vectors(options.vectors)
    with TemporaryDirectory(prefix="nereid-bench-") as folder, embedded_postgres() as postgres:
        asyncio.run(_database_part(postgres, vectors, options.clients))
        models = Path(folder, "models")
        write_fixture("null", models)
        write_embedding(models, options.milliseconds)
        with embedded_triton(models, "null") as triton:
            _end_to_end(triton, postgres, options, Path(folder))
    return 0


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("search", help="search on PostgreSQL: recall, latency, growth, filters, size; and end to end")
    command.add_argument("--vectors", type=count, default=100_000, help="images that are added")
    command.add_argument("--milliseconds", type=float, default=1.0, help="what the model of vectors takes, end to end")
    add_shared(command, clients=8, rounds=5, seconds=4.0, workers=1, images=None)
    command.set_defaults(run=run)


async def _database_part(postgres: Postgres, vectors: Vectors, clients: int) -> None:
    engine = _Watched(postgres.settings.search_database)
    await engine.open()
    try:
        size = len(vectors.all)
        everything = np.arange(size)
        first, rest = np.split(everything, [size // _SMALL])
        kinds = {"all": Kind(_TENANT, everything)}
        for name, share in _SHARES.items():
            left = np.flatnonzero(vectors.draws < share)
            kinds[f"a filter leaves {name}"] = Kind(_TENANT, left, Filter(metadata={name: True}))
        kinds[f"a tenant that has {_OTHER_SHARE:.0%}"] = Kind(_OTHER, vectors.others)
        memory = postgres.memory()
        rates = [await _add(engine, vectors, first, _TENANT, clients)]
        small = await _ask(engine, vectors, Kind(_TENANT, first), clients)
        rates.append(await _add(engine, vectors, rest, _TENANT, clients))
        await _add(engine, vectors, vectors.others, _OTHER, clients)
        found = {name: await _ask(engine, vectors, kind, clients) for name, kind in kinds.items()}
        growth = found["all"].percentile(50) / small.percentile(50)
        say()
        rows = [_row("all", len(first), small), *(_row(name, len(kinds[name].among), asked) for name, asked in found.items())]
        print(table([("database's part", "images", f"recall@{_TOP}", "p50 ms", "p99 ms", "plan", "holds"), *rows]))
        print(f"{clients} clients, {_QUERIES} questions; p50 grows {growth:.2f} times: {_holds(growth <= GROWTH)}")
        print(f"added one by one by {clients} clients: first {rates[0]:.0f}, then {rates[1]:.0f} images a second")
        for line in await _sizes(engine):
            print(line)
        print(f"memory of PostgreSQL: {memory / MIB:.0f} MiB, with the images {postgres.memory() / MIB:.0f} MiB")
        slowest = max(found, key=lambda name: max(found[name].seconds))
        print(f"the slowest question: {slowest}, {max(found[slowest].seconds) * 1e3:.1f} ms")
        question = vectors.questions[int(np.argmax(found[slowest].seconds))]
        print(await engine.explain(kinds[slowest], question, "ANALYZE, BUFFERS, SETTINGS"))
    finally:
        await engine.close()


class _Watched(PostgresEngine):
    """An engine that knows what it has asked PostgreSQL last."""

    last: tuple[str, Sequence[object]] = ("", ())

    @asynccontextmanager
    async def as_tenant(self, tenant: str) -> AsyncIterator[Any]:
        """Open a transaction, and note what it asks for the nearest."""

        def note(asked: Any) -> None:  # noqa: ANN401 - asyncpg has no types
            if "<=>" in asked.query:
                self.last = asked.query, asked.args

        async with super().as_tenant(tenant) as connection:
            connection.add_query_logger(note)
            try:
                yield connection
            finally:
                connection.remove_query_logger(note)

    async def explain(self, kind: "Kind", question: NDArray[np.float32], how: str = "COSTS") -> str:
        """Return the plan of a question."""
        await self.nearest(kind.tenant, "global", Vector(question, _MODEL), Page(_TOP), where=kind.where)
        await asyncio.sleep(0)  # loggers are called later
        query, values = self.last
        async with super().as_tenant(kind.tenant) as connection:
            if (table := await active(connection, "image")) is not None:
                await is_small(connection, table, "global")  # which decides how the transaction plans
            lines = [row[0] for row in await connection.fetch(f"EXPLAIN ({how}) {query}", *values)]
        return _VECTOR.sub("<vector>", "\n".join(lines))


async def _sizes(engine: PostgresEngine) -> list[str]:
    """Describe the largest relations."""
    async with engine.as_owner() as connection:
        rows = await connection.fetch(
            "SELECT relname, pg_relation_size(oid) AS main, pg_table_size(oid) AS whole, relkind FROM pg_class"
            " WHERE relkind IN ('r', 'i') AND pg_table_size(oid) > 2^20 ORDER BY 3 DESC LIMIT 6"
        )
    return [f"{row['relname']}: {row['whole'] / MIB:.0f} MiB" for row in rows]


async def _add(engine: PostgresEngine, vectors: Vectors, numbers: NDArray[np.intp], tenant: str, clients: int) -> float:
    """Add images as POST /ingest does; return how many a second."""
    left = iter(numbers.tolist())
    started = perf_counter()

    async def add() -> None:
        for number_ in left:
            if not number_ % 1000:
                say(f"{number_:,} images are there")
            filters = {name: True for name, share in _SHARES.items() if vectors.draws[number_] < share}
            image = NewImage(
                image_id=_id(number_),
                content_hash=hashlib.sha256(str(number_).encode()).digest(),
                path=f"/images/{number_}.jpg",
                metadata=filters,
                width=640,
                height=480,
                vectors=[Vector(vectors.all[number_], _MODEL)],
            )
            await engine.add(tenant, image)

    await asyncio.gather(*(add() for _ in range(clients)))
    return len(numbers) / (perf_counter() - started)


async def _ask(engine: _Watched, vectors: Vectors, kind: Kind, clients: int) -> Asked:
    """Ask all questions, with so many at a time, and compare the answers with those of the exact search."""
    exact = await asyncio.to_thread(vectors.nearest, kind.among)
    seconds = [0.0] * _QUERIES
    recalls = [0.0] * _QUERIES

    async def ask(numbers: Iterator[int]) -> None:
        for number_ in numbers:
            question = Vector(vectors.questions[number_], _MODEL)
            started = perf_counter()
            hits = await engine.nearest(kind.tenant, "global", question, Page(_TOP), where=kind.where)
            seconds[number_] = perf_counter() - started
            recalls[number_] = len({hit.image_id for hit in hits} & exact[number_]) / _TOP

    for questions in (range(_WARM_UP), range(_QUERIES)):
        say(f"asking among {len(kind.among):,} images")
        numbers = iter(questions)
        await asyncio.gather(*(ask(numbers) for _ in range(clients)))
    plan = await engine.explain(kind, vectors.questions[0])
    return Asked(seconds, float(np.mean(recalls)), uses_hnsw="_global on vectors_" in plan)


def _row(name: str, size: int, asked: Asked) -> tuple[str, ...]:
    p50, p99 = asked.percentile(50), asked.percentile(99)
    holds = asked.recall >= RECALL and asked.uses_hnsw and (name != "all" or (p50 <= P50_MS and p99 <= P99_MS))
    plan = "HNSW" if asked.uses_hnsw else "other"
    return name, f"{size:,}", f"{asked.recall:.3f}", number(p50), number(p99), plan, _holds(holds)


def _holds(holds: bool) -> str:  # noqa: FBT001 - what it says
    return "holds" if holds else "does NOT hold"


def _end_to_end(triton: Triton, postgres: Postgres, options: argparse.Namespace, folder: Path) -> None:
    """Send the same images to both routes, in turn, and print what a search takes beside a vector alone."""
    samples = unlabelled_samples(options.images)
    # With much time, none is refused because the machine is slow.
    settings = {"NEREID_SEARCH": "on", "NEREID_DATABASE_URL": postgres.settings.search_database, "NEREID_TIMEOUT_SECONDS": "60"}
    lineup = Lineup(triton, options.workers, folder, settings=settings)
    contestant = lineup.contestant("nereid", "null")
    found: dict[str, list[Measurement]] = {name: [] for name in _PATHS}
    with lineup.start(contestant) as server:
        for turn in range(options.rounds + 1):
            for name, path in _PATHS.items():
                say(f"round {turn} of {options.rounds}, {name}")
                one = measure(contestant, server, [triton], Load(samples, options.clients, options.seconds, path=path))
                if one.outcome.failed:
                    raise ContestantError(f"not all requests were answered: {path}, {one.outcome.statuses}")
                if turn:  # the first one prepares the model and the database
                    found[name].append(one)
    say()
    print(describe(found))
    print(f"{options.workers} workers, {options.clients} clients, a model of {options.milliseconds:g} ms")


def describe(found: Mapping[str, Sequence[Measurement]]) -> str:
    """Format a table of the routes, with the medians of their rounds, and of the ratios in the same round to the first one."""
    rows: list[tuple[str, ...]] = [("end to end", "requests/s", "p50 ms", "p99 ms", "ratio of p50", f"at most {END_TO_END}")]
    base = [one.figures["p50"] for one in next(iter(found.values()))]
    for name, rounds in found.items():
        ratio = median(one.figures["p50"] / least for one, least in zip(rounds, base, strict=True))
        figures = [number(median(one.figures[figure] for one in rounds)) for figure in ("requests/s", "p50", "p99")]
        rows.append((name, *figures, f"{ratio:.2f}", _holds(ratio <= END_TO_END)))
    return table(rows)


def _id(number_: int) -> str:
    return f"image-{number_}"
