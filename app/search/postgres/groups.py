"""Groups of near duplicates, and clusters of vectors."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.errors import UnknownRecord
from app.search.engine import FAMILY, MAX_LISTED, DuplicateGroup, Found, Hit, Page, VectorIndex
from app.search.postgres.connection import Connection, fetch_page, lock
from app.search.postgres.find import HIT, HIT_JOINS
from app.search.postgres.images import Images
from app.search.postgres.values import check_vector, record, to_uuid
from app.search.postgres.vectors import Table, active

_CHUNK = 2000
"""Vectors that are assigned in one transaction."""


class Groups(Images):
    """Groups and clusters."""

    async def duplicate_groups(self, tenant: str, page: Page, min_size: int) -> Found:
        async with self.as_tenant(tenant) as connection:
            rows, total = await fetch_page(
                connection,
                "SELECT g.group_id::text, size, image_id, path, metadata, 1::double precision AS score FROM ("
                "SELECT group_id, count(*) AS size, min(number) AS first FROM images WHERE group_id IS NOT NULL GROUP BY 1"
                " HAVING count(*) >= $1) g JOIN images ON number = first ORDER BY size DESC, first",
                page,
                max(2, min_size),
            )
        return Found([DuplicateGroup(row["group_id"], [record(Hit, row)], row["size"]) for row in rows], total)

    async def duplicate_group(self, tenant: str, group_id: str) -> DuplicateGroup:
        async with self.as_tenant(tenant) as connection:
            table = await _table(connection, "global")  # it has made the groups
            rows = await connection.fetch(
                "SELECT image_id, path, i.metadata, count(*) OVER () AS size,"
                " coalesce(1 - (vector <=> first_value(vector) OVER (ORDER BY i.number)), 1) AS score"
                f" FROM images i LEFT JOIN vectors_{table.number} v ON v.image = i.number AND v.part IS NULL"
                " WHERE group_id = $1 ORDER BY i.number LIMIT $2",
                *(to_uuid(group_id, "group"), MAX_LISTED),
            )
        if not rows:
            raise UnknownRecord("There is no such group")
        return DuplicateGroup(group_id, [record(Hit, row) for row in rows], rows[0]["size"])

    async def duplicate_statistics(self, tenant: str) -> tuple[int, int]:
        query = "SELECT count(*) AS size FROM images WHERE group_id IS NOT NULL GROUP BY group_id HAVING count(*) > 1"
        async with self.as_tenant(tenant) as connection:
            row = await connection.fetchrow(f"SELECT count(*), coalesce(sum(size), 0)::bigint FROM ({query}) groups")
        return row[0], row[1]

    async def sample(self, tenant: str, index: VectorIndex, limit: int) -> NDArray[np.float32]:
        async with self.as_tenant(tenant) as connection:
            table = await active(connection, FAMILY[index])
            rows = table and await connection.fetch(
                f"SELECT vector::vector FROM vectors_{table.number} WHERE number = ANY (ARRAY("
                f"SELECT number FROM vectors_{table.number} WHERE index = $1 ORDER BY random() LIMIT $2))",
                *(index, limit),
            )
        return await asyncio.to_thread(_stack, rows or (), table.dimensions if table else 0)

    async def save_clusters(self, tenant: str, index: VectorIndex, centroids: NDArray[np.float32]) -> int:
        async with self.as_tenant(tenant) as connection:
            table = await _table(connection, index)
            await lock(connection, (tenant, "clusters", index))
            for relation in (f"members_{table.number}", "clusters"):
                await connection.execute(f"DELETE FROM {relation} WHERE index = $1", index)
            await connection.executemany(
                "INSERT INTO clusters (model, index, cluster_id, centre) VALUES ($1, $2, $3, $4)",
                [(table.number, index, at, check_vector(centre, table.dimensions)) for at, centre in enumerate(centroids)],
            )
        return await self.assign_clusters(tenant, index)

    async def assign_clusters(self, tenant: str, index: VectorIndex) -> int:
        assigned, made_at = 0, None
        while True:
            async with self.as_tenant(tenant) as connection:
                table = await _table(connection, index)
                await lock(connection, (tenant, "clusters", index))
                rows = await connection.fetch(
                    "SELECT centre AS vector, made_at FROM clusters WHERE model = $1 AND index = $2 ORDER BY cluster_id",
                    table.number,
                    index,
                )
                if not rows:
                    raise UnknownRecord("This index has no clusters")
                made_at = made_at or rows[0]["made_at"]
                if rows[0]["made_at"] != made_at:  # somebody else has trained, and assigns
                    return assigned
                found = await connection.fetch(
                    f"SELECT v.number, v.vector::vector FROM vectors_{table.number} v"
                    f" LEFT JOIN members_{table.number} m ON m.vector = number WHERE v.index = $1 AND m.vector IS NULL LIMIT $2"
                    " FOR KEY SHARE OF v SKIP LOCKED",  # what is being deleted is left out
                    *(index, _CHUNK),
                )
                if not found:
                    return assigned
                values = await asyncio.to_thread(_assign, rows, found, table.dimensions)
                await connection.execute(
                    f"INSERT INTO members_{table.number} (index, vector, cluster_id, score)"
                    " SELECT $1, * FROM unnest($2::bigint[], $3::integer[], $4::double precision[])",
                    *(index, *values),
                )
                assigned += len(found)

    async def clusters(self, tenant: str, index: VectorIndex) -> Sequence[int]:
        async with self.as_tenant(tenant) as connection:
            table = await active(connection, FAMILY[index])
            rows = table and await connection.fetch(
                "SELECT count(m.vector) FROM clusters c"
                f" LEFT JOIN members_{table.number} m USING (tenant, index, cluster_id)"
                " WHERE c.model = $1 AND index = $2 GROUP BY cluster_id ORDER BY cluster_id",
                *(table.number, index),
            )
        return [row[0] for row in rows or ()]

    async def cluster(self, tenant: str, index: VectorIndex, cluster_id: int, page: Page) -> Found:
        if cluster_id >= len(await self.clusters(tenant, index)):
            raise UnknownRecord("There is no such cluster")
        async with self.as_tenant(tenant) as connection:
            table = await _table(connection, index)
            rows, total = await fetch_page(
                connection,
                f"SELECT {HIT}, m.score FROM members_{table.number} m"
                f" JOIN vectors_{table.number} n ON n.number = m.vector {HIT_JOINS}"
                " WHERE m.index = $1 AND m.cluster_id = $2 ORDER BY m.score DESC, m.vector",
                page,
                *(index, cluster_id),
            )
        return Found([record(Hit, row) for row in rows], total)


async def _table(connection: Connection, index: VectorIndex) -> Table:
    table = await active(connection, FAMILY[index])
    if table is None:
        raise UnknownRecord("This index has no vectors yet")
    return table


def _stack(rows: Sequence[Any], dimensions: int) -> NDArray[np.float32]:
    return np.stack([row["vector"] for row in rows]) if rows else np.zeros((0, dimensions), np.float32)


def _assign(centres: Sequence[Any], rows: Sequence[Any], dimensions: int) -> tuple[list[int], list[int], list[float]]:
    """Return numbers of vectors, and of each the nearest centre and the cosine to that."""
    vectors = _stack(rows, dimensions)
    scores = vectors @ _stack(centres, dimensions).T
    nearest = scores.argmax(1)
    return [row["number"] for row in rows], nearest.tolist(), scores[np.arange(len(rows)), nearest].astype(float).tolist()
