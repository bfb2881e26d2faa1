"""Persons, and which faces are theirs. A person is there as long as there are faces of theirs."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from app.errors import UnknownRecord
from app.search.engine import MAX_LISTED, Found, Hit, Page, Person
from app.search.postgres.connection import Connection, fetch_page
from app.search.postgres.find import HIT, HIT_JOINS
from app.search.postgres.images import Images, drop_without_faces
from app.search.postgres.values import check_text, record, to_uuid
from app.search.postgres.vectors import active, is_small

_NEIGHBOURS = 10
_CHUNK = 200
"""Faces whose neighbours are looked for in one statement."""
_PERSONS = """
SELECT person_id, name, count(*) AS face_count, (array_agg(part_id ORDER BY quality DESC, part_id))[1] AS reference_face_id
FROM persons JOIN parts ON person = person_id {where} GROUP BY person_id ORDER BY face_count DESC, person_id
"""
_THUMBNAIL = "(SELECT thumbnail FROM parts WHERE part_id = reference_face_id) AS thumbnail"


class Persons(Images):
    """Persons."""

    async def face_pairs(self, tenant: str, min_score: float) -> Sequence[tuple[str, str]]:
        pairs: list[tuple[float, str, str]] = []
        after = 0
        while True:
            async with self.as_tenant(tenant) as connection:
                table = await active(connection, "face")
                if table is None:
                    break
                others = f"SELECT part, vector FROM vectors_{table.number} WHERE index = 'faces'"
                order = "(vector <=> one.vector) + 0" if await is_small(connection, table, "faces") else "vector <=> one.vector"
                rows = await connection.fetch(
                    f"WITH chunk AS MATERIALIZED (SELECT number, part, vector FROM vectors_{table.number} WHERE index = 'faces'"
                    " AND number > $1 ORDER BY number LIMIT $2)"
                    " SELECT one.number, one.part AS one, array_agg(ARRAY[(one.vector <=> other.vector)::text, other.part::text])"
                    " FILTER (WHERE other.part <> one.part"
                    " AND one.vector <=> other.vector <= 1 - $3::double precision) AS others FROM chunk one CROSS JOIN LATERAL ("
                    f"{others} ORDER BY {order} LIMIT {_NEIGHBOURS + 1}) other GROUP BY 1, 2 ORDER BY 1",
                    *(after, _CHUNK, min_score),
                )
                if not rows:
                    break
                for row in rows:
                    pairs += [(float(far), str(row["one"]), other) for far, other in row["others"] or ()]
                after = rows[-1]["number"]
        distances = np.array([far for far, *_ in pairs])
        ranked = await asyncio.to_thread(lambda: distances.argsort(kind="stable"))  # unlike `sorted`, it lets others run
        return [pairs[at][1:] for at in ranked.tolist()]

    async def faces_by_person(self, tenant: str) -> Mapping[str, str | None]:
        async with self.as_tenant(tenant) as connection:
            rows = await connection.fetch("SELECT part_id, person FROM parts WHERE landmarks IS NOT NULL")
        return {str(row["part_id"]): row["person"] and str(row["person"]) for row in rows}

    async def named_persons(self, tenant: str) -> Mapping[str, str]:
        async with self.as_tenant(tenant) as connection:
            rows = await connection.fetch("SELECT person_id, name FROM persons WHERE name IS NOT NULL")
        return {str(row["person_id"]): row["name"] for row in rows}

    async def save_persons(self, tenant: str, groups: Sequence[tuple[str | None, Sequence[str]]]) -> int:
        async with self.as_tenant(tenant) as connection:
            for person_id, face_ids in groups:
                faces = [to_uuid(face_id, "face") for face_id in face_ids]
                old = await connection.fetch(
                    "SELECT DISTINCT person FROM parts WHERE part_id = ANY ($1) AND person IS NOT NULL", faces
                )
                try:
                    person = await (
                        connection.fetchval("INSERT INTO persons DEFAULT VALUES RETURNING person_id")
                        if person_id is None
                        else _lock(connection, person_id)
                    )
                except UnknownRecord:
                    continue
                await connection.execute(
                    "UPDATE parts SET person = $1 WHERE part_id = ANY ($2) AND landmarks IS NOT NULL", person, faces
                )
                await drop_without_faces(connection, [person, *(row["person"] for row in old)])
        return sum(person_id is None for person_id, _ in groups)

    async def persons(self, tenant: str, page: Page) -> Found:
        async with self.as_tenant(tenant) as connection:
            rows, total = await fetch_page(connection, _PERSONS.format(where=""), page, more=_THUMBNAIL)
        return Found([record(Person, row) for row in rows], total)

    async def person(self, tenant: str, person_id: str, limit: int | None = MAX_LISTED) -> tuple[Person, Sequence[Hit]]:
        person = to_uuid(person_id, "person")
        async with self.as_tenant(tenant) as connection:
            found, _ = await fetch_page(connection, _PERSONS.format(where="WHERE person_id = $1"), Page(1), person, more=_THUMBNAIL)
            if not found:
                raise UnknownRecord("There is no such person")
            faces = await connection.fetch(
                f"SELECT {HIT}, 1::double precision AS score"
                f" FROM (SELECT image, part_id AS part FROM parts WHERE person = $1"
                f" ORDER BY quality DESC, part_id LIMIT $2) n {HIT_JOINS} ORDER BY p.quality DESC, p.part_id",
                *(person, limit),
            )
        return record(Person, found[0]), [record(Hit, row) for row in faces]

    async def name_person(self, tenant: str, person_id: str, name: str) -> int:
        async with self.as_tenant(tenant) as connection:
            person = await _lock(connection, person_id)
            await connection.execute(
                "UPDATE persons SET name = $2 WHERE person_id = $1", person, check_text(name, "The name of a person")
            )
            return int(await connection.fetchval("SELECT count(*) FROM parts WHERE person = $1", person))

    async def merge_persons(self, tenant: str, source_id: str, target_id: str) -> int:
        async with self.as_tenant(tenant) as connection:
            locked = {person_id: await _lock(connection, person_id) for person_id in sorted({source_id, target_id})}  # in one order
            source, target = locked[source_id], locked[target_id]
            if source == target:
                return 0
            rows = await connection.fetch("UPDATE parts SET person = $2 WHERE person = $1 RETURNING part_id", source, target)
            await connection.execute("DELETE FROM persons WHERE person_id = $1", source)
        return len(rows)

    async def delete_person(self, tenant: str, person_id: str, *, deletes_faces: bool) -> int:
        async with self.as_tenant(tenant) as connection:
            person = await _lock(connection, person_id)
            change = "DELETE FROM parts" if deletes_faces else "UPDATE parts SET person = NULL"
            rows = await connection.fetch(f"{change} WHERE person = $1 RETURNING part_id", person)
            await connection.execute("DELETE FROM persons WHERE person_id = $1", person)
        return len(rows)


async def _lock(connection: Connection, person_id: str) -> Any:  # noqa: ANN401 - a UUID
    found = await connection.fetchval("SELECT person_id FROM persons WHERE person_id = $1 FOR UPDATE", to_uuid(person_id, "person"))
    if found is None:
        raise UnknownRecord("There is no such person")
    return found
