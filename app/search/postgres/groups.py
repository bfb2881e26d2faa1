"""Groups of near duplicates."""

from app.errors import UnknownRecord
from app.search.engine import MAX_LISTED, DuplicateGroup, Found, Hit, Page
from app.search.postgres.connection import fetch_page
from app.search.postgres.images import Images
from app.search.postgres.values import record, to_uuid
from app.search.postgres.vectors import active


class Groups(Images):
    """Groups of near duplicates."""

    async def duplicate_groups(self, tenant: str, page: Page, min_size: int) -> Found:
        """Return groups, largest first."""
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
        """Return a group; raise UnknownRecord."""
        async with self.as_tenant(tenant) as connection:
            table = await active(connection, "image")  # its vectors have made the groups
            rows = table and await connection.fetch(
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
        """Return the number of groups, and that of the images in them."""
        query = "SELECT count(*) AS size FROM images WHERE group_id IS NOT NULL GROUP BY group_id HAVING count(*) > 1"
        async with self.as_tenant(tenant) as connection:
            row = await connection.fetchrow(f"SELECT count(*), coalesce(sum(size), 0)::bigint FROM ({query}) groups")
        return row[0], row[1]
