"""Tables of vectors, one a model; and the models whose vectors are kept."""

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

from app.errors import InvalidParameter, SearchUnavailable
from app.search.engine import FAMILY, PART_OF, Duplicate, Family, Known, ModelsInUse, NewImage, Page, States, Vector, VectorIndex
from app.search.postgres.connection import VECTORS_LOCK, Connection, Database, locking
from app.search.postgres.migrations import refuse_damage
from app.search.postgres.values import check_vector

_MAX_DIMENSIONS, _MAX_SINGLE = 4000, 1000
"""HNSW indexes of pgvector go up to this with half precision. Single precision is for vectors of which two fit into a page."""

_TABLE = """
CREATE TABLE vectors_{n} (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant text NOT NULL DEFAULT current_setting('nereid.tenant'),
    image bigint NOT NULL REFERENCES images ON DELETE CASCADE,
    part uuid REFERENCES parts ON DELETE CASCADE,
    index text NOT NULL,
    metadata jsonb NOT NULL,  -- copies of what filters ask, so that these are answered while the index is walked
    added_at timestamptz NOT NULL,
    class_name text,
    vector {type}({dimensions}) NOT NULL,
    UNIQUE NULLS NOT DISTINCT (image, part)
) WITH (toast_tuple_target = 8160);  -- vectors beside the rest are compared in a third of the time
CREATE INDEX ON vectors_{n} (part);
CREATE INDEX ON vectors_{n} (tenant, index, added_at);
CREATE INDEX ON vectors_{n} (tenant, index, class_name) WHERE class_name IS NOT NULL;
CALL protect('vectors_{n}');
"""
_HNSW = "CREATE INDEX vectors_{n}_{index} ON vectors_{n} USING hnsw (vector {type}_cosine_ops) WHERE index = '{index}';"
_INSERT = """
INSERT INTO vectors_{n} (image, part, index, metadata, added_at, class_name, vector)
SELECT $1, $2, $3, metadata, added_at, $4, $5 FROM images WHERE number = $1
ON CONFLICT DO NOTHING
"""

TWIN = """
SELECT image_id, path, 1::double precision, group_id::text, number, states, content_hash = $1 AS is_same
FROM images WHERE tenant = $4 AND (image_id = $2 OR (content_hash = $1 AND $3))
ORDER BY content_hash = $1 DESC, image_id = $2 DESC, number LIMIT 1
"""
"""The image with this content, if there is one, else the image with this id; the first columns are the fields of `Duplicate`."""
_SHORTLY, _SHARED = "SET LOCAL lock_timeout = '1s';", f"SELECT pg_advisory_xact_lock_shared({VECTORS_LOCK});"
_MODELS = locking(("models",))
_COUNT_SECONDS, _MAX_NUMBER = 600, 2**63 - 1

OF_METADATA = " AND metadata @> $2"
"""How a filter of metadata begins, which `match_metadata` of the schema knows, too."""
_SMALL, _MOST_COMPARED, _WALKED = 1000, 20_000, 200
"""Vectors up to which all are compared, at least and at most; and what a walk through the index costs at least, in comparisons."""
_SAMPLED = 200
"""Vectors among which is looked how many a filter leaves."""


class Table(NamedTuple):
    """A table of vectors."""

    number: int
    family: Family
    model: str
    dimensions: int
    state: str
    rows: float
    """Of all tenants, as the planner estimates them."""


NewVectors: TypeAlias = tuple[UUID | None, VectorIndex, str | None, Sequence[Vector]]
"""The id of a part, None for the image itself; its index, class, and vectors."""


class Vectors(Database):
    """Models and their tables."""

    async def models(self, family: Family) -> ModelsInUse:
        """Return the models whose vectors are kept. The first vector that is added makes its model the active one."""
        async with self.as_owner(asks_once=True) as connection:
            known = await by_state(connection, family)
        return ModelsInUse(*(known[state].model if state in known else None for state in ("active", "next")))

    async def is_read_only(self) -> bool:
        """Return whether nothing can be added, although the tables can be read, as in a replica."""
        async with self.connected() as connection:
            await by_state(connection, "image")
            return bool(await connection.fetchval("SELECT current_setting('transaction_read_only')::boolean"))

    async def last_vector(self, family: Family) -> int:
        """Return the number of the last vector; what is added after it is added by those who know the next model, too."""
        async with self._alone() as connection:
            known = await by_state(connection, family)
            number = await connection.fetchval(f"SELECT max(number) FROM vectors_{known['active'].number}")
        return number or 0

    async def images_without(
        self, family: Family, after: int, last: int, limit: int
    ) -> tuple[Sequence[tuple[str, str, str | None]], int]:
        """Look at vectors after one number and up to another, so many at most, for images that lack some of the next model.

        Return their tenants, ids and paths, and the number up to which was looked.
        """
        async with self.as_owner(_SHARED) as connection:
            known = await by_state(connection, family)
            if "next" not in known:
                return [], last
            block = f"SELECT number FROM vectors_{known['active'].number} WHERE number > $1 AND number <= $2 ORDER BY 1 LIMIT $3"
            end = await connection.fetchval(f"SELECT max(number) FROM ({block}) block", after, last, limit)
            rows = await connection.fetch(
                f"SELECT tenant, image_id, path FROM images WHERE number IN (SELECT image FROM ({_lacking(known)}) lacking)",
                *(after, end or last),
            )
        return [tuple(row) for row in rows], end or last

    async def switch_model(self, family: Family, last: int, may_lose: int) -> int | None:
        """Search the vectors of the next model if at most `may_lose` images lack some; return how many do.

        Return None if images that lack some were added after the vector `last`: they may still get them.
        """
        newest = await self.last_vector(family)
        async with self.as_owner(f"{_SHARED} SET LOCAL statement_timeout = 0;") as connection:  # which holds up nobody
            counted = await by_state(connection, family)
            lost = await _count_lacking(connection, counted, 0, last)
            if await _count_lacking(connection, counted, last, newest):
                return None
        if lost <= may_lose:
            async with self._alone() as connection:
                known = await by_state(connection, family)
                if "next" not in known:
                    return lost
                is_same = {table.number for table in known.values()} == {table.number for table in counted.values()}
                if not is_same or await _count_lacking(connection, known, newest, _MAX_NUMBER):
                    return None
                await delete_model(connection, family, "active")
                await connection.execute("UPDATE models SET state = 'active' WHERE number = $1", known["next"].number)
        return lost

    async def drop_unused(self) -> None:
        """Drop the tables of vectors that are not searched any more; raise SearchUnavailable if a backup, for one, reads them."""
        async with self.as_owner(_SHORTLY) as connection:
            for row in await connection.fetch("DELETE FROM unused RETURNING number"):
                await connection.execute(f"DROP TABLE IF EXISTS vectors_{row['number']}")

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[Connection]:
        # Whoever waits for this lock holds up all searches.
        async with self.as_owner(f"{_SHORTLY} SELECT pg_advisory_xact_lock({VECTORS_LOCK}); {_MODELS}") as connection:
            yield connection

    async def find_content(self, tenant: str, new: NewImage, *, others: bool) -> tuple[Known | None, Mapping[Family, ModelsInUse]]:
        """Return what is known of the content of an image, without `others` that of its id only; and the models in use."""
        kept = "SELECT array_agg(ARRAY[family, state, model]) FROM models"
        query = f"SELECT twin.*, names FROM ({kept}) kept (names) LEFT JOIN ({TWIN}) twin ON true"
        async with self.as_owner(asks_once=True) as connection:
            row = await connection.fetchrow(query, new.content_hash, new.image_id, others, tenant)
        names = {(family, state): model for family, state, model in row["names"] or ()}
        models = {family: ModelsInUse(names.get((family, "active")), names.get((family, "next"))) for family in PART_OF}
        if not row["is_same"]:
            return None, models
        async with self.as_tenant(tenant) as connection:
            states, lacks = await states_of(connection, row), await _lacking_of(connection, row["number"])
        return Known(Duplicate(*row[:4]), states, lacks), models

    async def parts(self, tenant: str, image_id: str, family: Family) -> Mapping[str | None, Sequence[float]]:
        """Return the box of each part of an image that has a vector, None for the image itself; landmarks follow that of a face."""
        async with self.as_tenant(tenant) as connection:
            table = await active(connection, family)
            rows = table and await connection.fetch(
                "SELECT part, coalesce(box, '{0,0,1,1}') || landmarks AS values "
                f"FROM vectors_{table.number} v LEFT JOIN parts ON part_id = part "
                "WHERE v.image = (SELECT number FROM images WHERE image_id = $1)",
                image_id,
            )
        return {row["part"] and str(row["part"]): row["values"] for row in rows or ()}

    async def add_vectors(self, tenant: str, image_id: str, content_hash: bytes, parts: Mapping[str | None, Vector]) -> bool:
        """Add vectors of the next model: of the image (None), and of its parts; return False if it has changed meanwhile."""
        async with self.as_tenant(tenant) as connection:
            image = await connection.fetchval(
                "SELECT number FROM images WHERE image_id = $1 AND content_hash = $2 FOR SHARE", image_id, content_hash
            )
            rows = await connection.fetch("SELECT part_id, index, class_name FROM parts WHERE image = $1", image)
            kept: dict[str | None, Any] = {str(row["part_id"]): row for row in rows} | {None: (None, "global", None)}
            known = await tables(connection)
            is_wanted = {vector.model for vector in parts.values()} <= {table.model for table in known}
            if image is None or not is_wanted or not parts.keys() <= kept.keys():
                return False
            await insert(connection, known, image, [(*kept[part_id], [vector]) for part_id, vector in parts.items()])
        return True


async def begin_model(connection: Connection, family: Family, model: str, dimensions: int) -> None:
    """Keep vectors of another model beside those of the active one; raise InvalidParameter for a third one, or IndexRefused."""
    if dimensions > _MAX_DIMENSIONS:
        raise InvalidParameter(f"An index of vectors has at most {_MAX_DIMENSIONS} dimensions; those of {model} have {dimensions}")
    await connection.execute(_SHARED + _MODELS)  # in this order, as everywhere
    known = await by_state(connection, family)
    if model in (table.model for table in known.values()):
        return
    if "next" in known:
        raise InvalidParameter(
            f"The index is being made anew with {known['next'].model}; DELETE /search/reindex/{family} gives that up"
        )
    await refuse_damage(connection)
    number = await connection.fetchval(
        "INSERT INTO models (family, model, dimensions, state) VALUES ($1, $2, $3, $4) RETURNING number",
        *(family, model, dimensions, "next" if known else "active"),
    )
    kind = "vector" if dimensions <= _MAX_SINGLE else "halfvec"
    indexes = "".join(_HNSW.format(n=number, index=name, type=kind) for name in FAMILY if FAMILY[name] == family)
    await connection.execute(_TABLE.format(n=number, type=kind, dimensions=dimensions) + indexes)


async def delete_model(connection: Connection, family: Family, state: str) -> bool:
    """Keep no vectors of a model any more; return False if there is no such one. Its table goes later: others may read it."""
    query = "WITH old AS (DELETE FROM models WHERE family = $1 AND state = $2 RETURNING number)"
    return bool(await connection.fetchval(f"{query} INSERT INTO unused SELECT number FROM old RETURNING true", family, state))


def _lacking(known: Mapping[str, Table]) -> str:
    # Images and parts of vectors after $1 and up to $2 that have none of the next model.
    some = f"FROM vectors_{known['active'].number} WHERE number > $1 AND number <= $2"
    others = f"FROM vectors_{known['next'].number} WHERE image IN (SELECT image {some})"
    return f"SELECT image, part {some} EXCEPT SELECT image, part {others}"


async def _lacking_of(connection: Connection, image: int) -> Mapping[Family, str]:
    # Returns the next models of which an image lacks vectors, by family.
    found: dict[Family, str] = {}
    for table in await tables(connection):
        if table.state == "next" and (searched := await active(connection, table.family)):
            some = [f"SELECT part FROM vectors_{number} WHERE image = $1" for number in (searched.number, table.number)]
            if await connection.fetchval(f"SELECT EXISTS ({' EXCEPT '.join(some)})", image):
                found[table.family] = table.model
    return found


async def states_of(connection: Connection, row: Any) -> States | None:  # noqa: ANN401 - asyncpg's record of an image
    """Return the states of the parts of an image now: its vectors may be those of a later model, or were lost when that came."""
    states: dict[str, dict[str, str]] = row["states"] or {}
    for family, part in PART_OF.items():
        own, table = states.get(part, {}), await active(connection, family)
        if table and own.get("state") == "there" and own.get("model", table.model) != table.model:
            query = f"SELECT EXISTS (SELECT FROM vectors_{table.number} WHERE image = $1)"
            lost = {"state": "left_out", "why": f"its vectors were lost when the model was changed to {table.model}"}
            states[part] = own | {"model": table.model} if await connection.fetchval(query, row["number"]) else lost
    return row["states"] and states


async def count(connection: Connection, image: int) -> Mapping[str, int]:
    """Return how many records of an image are in each index, if any."""
    counts = Counter[str]()
    for table in await tables(connection):
        if table.state == "active":
            query = f"SELECT index, count(*) FROM vectors_{table.number} WHERE image = $1 GROUP BY 1 ORDER BY 1"
            counts.update(dict(await connection.fetch(query, image)))
    counts.update(ocr=await connection.fetchval("SELECT count(*) FROM texts WHERE image = $1", image))
    return +counts


async def _count_lacking(connection: Connection, known: Mapping[str, Table], after: int, last: int) -> int:
    query = f"SELECT count(DISTINCT image) FROM ({_lacking(known)}) lacking"
    return await connection.fetchval(query, after, last, timeout=_COUNT_SECONDS) if "next" in known else 0


async def tables(connection: Connection) -> Sequence[Table]:
    """Return the tables of vectors; they stay until the end of the transaction."""
    rows = await connection.fetch(
        "SELECT number, family, model, dimensions, state, greatest(reltuples, 0)"
        " FROM models JOIN pg_class ON oid = to_regclass('vectors_' || number)"
    )
    return [Table(*row) for row in rows]


async def by_state(connection: Connection, family: Family) -> Mapping[str, Table]:
    """Return the tables of a family, `active` and `next`, if there are such."""
    return {table.state: table for table in await tables(connection) if table.family == family}


async def active(connection: Connection, family: Family) -> Table | None:
    """Return the table of vectors that are searched."""
    return (await by_state(connection, family)).get("active")


async def insert(connection: Connection, known: Sequence[Table], image: int, new: Sequence[NewVectors]) -> Counter[str]:
    """Insert vectors of an image into the tables of their models; return how many are searched in each index."""
    counts, models = Counter[str](), {(table.family, table.model) for table in known}
    for _, index, _, vectors in new:
        if vectors and not any((FAMILY[index], vector.model) in models for vector in vectors):
            raise SearchUnavailable(f"The index keeps no vectors of {vectors[0].model}; it has changed its model, or must do so")
    for table in known:
        rows = [
            (image, part_id, index, class_name, check_vector(vector.values, table.dimensions))
            for part_id, index, class_name, vectors in new
            for vector in vectors
            if (FAMILY[index], vector.model) == (table.family, table.model)
        ]
        if rows:
            await connection.executemany(_INSERT.format(n=table.number), rows)
            counts.update(row[2] for row in rows if table.state == "active")
    return counts


async def _few(  # noqa: PLR0913, PLR0917 - the parts of a question
    connection: Connection, table: Table, index: VectorIndex, vector: Vector, limit: int, where: str, values: Sequence[object]
) -> str | None:
    # Returns the condition under which all are compared, if filters leave few of the tenant; else None: the transaction walks the
    # index. The fewer are left, the more others are on the walk: at the square root, it costs as much as comparing them.
    metadata = (others := where.replace(OF_METADATA, "")) != where
    most = int(min(max(_SMALL, (max(_WALKED, limit) * table.rows) ** 0.5), _MOST_COMPARED))
    most = _MOST_COMPARED if metadata and others else most  # both may leave still fewer together
    few = f"SELECT FROM vectors_{table.number} WHERE index = '{index}'{others} LIMIT {most + 1}"
    matching, counts = f"match_metadata($2, {most + 1})", f"(SELECT count(*) FROM ({few}) few)"
    # Looking up many metadata takes as long as a walk: it is skipped if a sample, spread over the table, has many.
    if metadata:
        numbers = f"SELECT i * 2654435761 % {max(table.rows, 1):.0f} FROM generate_series(1, {_SAMPLED}) i"
        sample = f"SELECT count(*) FROM vectors_{table.number} WHERE number = ANY (ARRAY({numbers})) AND index = '{index}'{where}"
        if_unclear = f"CASE WHEN sampled < {1.5 * _SAMPLED * most / max(table.rows, 1)} THEN"
        counts = f"{if_unclear} {counts} END, {if_unclear} (SELECT count(*) FROM {matching}) END FROM ({sample}) sample (sampled)"
    # What the planner knows of filters does not get through row-level security: it would sort half a table.
    row = await connection.fetchrow(
        f"SELECT set_config('enable_sort', 'off', true), set_config('hnsw.ef_search', '{100 if where else 64}', true),"
        f" {counts} WHERE $1::vector IS NOT NULL",  # the filters count their values from $2
        *(vector.values, *values),
    )
    if row[2] is None:
        return None
    if metadata and row[3] <= min(row[2], most):
        return f"{others} AND image = ANY (ARRAY (SELECT {matching}))"
    return where if row[2] <= most else None


async def nearest(  # noqa: PLR0913 - the parts of a question
    connection: Connection,
    table: Table,
    index: VectorIndex,
    vector: Vector,
    page: Page,
    *,
    select: str = "SELECT * FROM n",
    where: str = "",
    values: Sequence[object] = (),
    is_exact: bool = False,
) -> Sequence[Any]:
    """Return what `select` makes of the nearest, `n (image, part, score)`; `values` are the parameters from $2 on."""
    # `is_exact` compares all that `where` leaves: a walk through the index may not come to them, if they are few.
    wanted = page.size + page.offset
    # What the index returns is nearly in order, and the nearest are among a few more: with a filter that leaves 1 % of 1,000
    # clusters, 98 % of them; 64 % if it returns them in order, as it then leaves out what it comes to too late.
    limit, rows = wanted + min(3 * wanted, 300), list[Any]()
    few = where if is_exact else await _few(connection, table, index, vector, limit, where, values)
    walks = [(where, "vector <=> $1", limit)] if few is None else []
    for left, order, most in (*walks, (few or where, "(vector <=> $1) + 0", wanted)):
        rows = await connection.fetch(
            "WITH n AS (SELECT image, part, 1 - (vector <=> $1) AS score FROM ("
            f"SELECT image, part, vector FROM vectors_{table.number} WHERE index = '{index}'{left} ORDER BY {order} LIMIT {most}"
            f") found ORDER BY score DESC, image, part LIMIT {int(page.size)} OFFSET {int(page.offset)}) {select}",
            *(check_vector(vector.values, table.dimensions), *values),
        )
        if len(rows) == page.size:
            break
    return rows
