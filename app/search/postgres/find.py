"""What a search finds: by vectors, and by words; and groups of near duplicates."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from app.errors import SearchUnavailable, UnknownRecord
from app.search.engine import EVERYTHING, FAMILY, Filter, Found, Hit, Index, Page, TextPart, Vector, VectorIndex
from app.search.postgres.connection import MAX_LISTED, fetch_page
from app.search.postgres.images import Images
from app.search.postgres.values import check_metadata, check_text, folded, grams_of, jaccard, record, to_uuid
from app.search.postgres.vectors import active, nearest, tables

_MAX_QUERY = 500
_SHARE_OF_GRAMS = 0.5
"""Of the words, that a text must have to be similar."""

_HIT = "i.image_id, i.path, i.metadata, p.part_id, p.box, p.score AS part_score, p.class_id, p.class_name, p.name"


class Find(Images):
    """Search."""

    async def nearest(  # noqa: PLR0913 - the parts of a question
        self, tenant: str, index: VectorIndex, vector: Vector, page: Page, *, min_score: float = -1, where: Filter = EVERYTHING
    ) -> Sequence[Hit]:
        """Return what is nearest, by descending score; raise SearchUnavailable if the index has vectors of other models only."""
        condition, values = _where(where, first=2)
        if where.classes:
            values.append([check_text(name, "A class") for name in where.classes])
            condition += f" AND class_name = ANY (${len(values) + 1})"
        if where.is_registered:
            condition += " AND part IN (SELECT part_id FROM parts WHERE name IS NOT NULL)"
        async with self.as_tenant(tenant) as connection:
            models = {table.model: table for table in await tables(connection) if table.family == FAMILY[index]}
            if (table := models.get(vector.model)) is None:
                if not models:
                    return []
                raise SearchUnavailable("The index has changed its model meanwhile")
            joined = "JOIN images i ON i.number = n.image LEFT JOIN parts p ON p.part_id = n.part"
            select = f"SELECT {_HIT}, n.score FROM n {joined} ORDER BY n.score DESC, n.image, n.part"
            options: Any = {"select": select, "where": condition, "values": values, "is_exact": where.is_registered}
            rows = await nearest(connection, table, index, vector, page, **options)
        return [record(Hit, row) for row in rows if row["score"] >= min_score]

    async def match_text(  # noqa: PLR0913 - the parts of a question
        self, tenant: str, words: str, page: Page, *, is_fuzzy: bool = False, where: Filter = EVERYTHING, min_score: float = 0
    ) -> Found:
        """Return the images whose text contains the words, best first; `is_fuzzy`: or similar ones, also of Chinese."""
        check_text(words, "The words", _MAX_QUERY)
        grams = grams_of(words)
        condition, values = _where(where, first=3 if is_fuzzy else 2)
        if is_fuzzy:
            matches, values = "match_grams($1, $2)", [sorted(grams), max(1, int(_SHARE_OF_GRAMS * len(grams))), *values]
        else:
            matches, values = "match_words(plainto_tsquery('simple', $1))", [folded(words), *values]
        async with self.as_tenant(tenant) as connection:
            rows, total = await fetch_page(
                connection,
                f"SELECT number, image_id, path, metadata, score FROM {matches} JOIN images ON number = image"
                f" WHERE score >= {float(min_score)}{condition} ORDER BY score DESC, number",
                page,
                *values,
                more="(SELECT lines FROM texts WHERE image = number) AS lines",
            )
        return Found(await asyncio.to_thread(lambda: [_text_hit(row, grams) for row in rows]), total)

    async def statistics(self, tenant: str) -> Mapping[Index, tuple[int, int]]:
        """Return the number of records and the bytes of each index; the bytes are those of all tenants."""
        found: dict[Index, tuple[int, int]] = dict.fromkeys((*FAMILY, "ocr"), (0, 0))
        async with self.as_tenant(tenant) as connection:
            for table in await tables(connection):
                if table.state == "active":
                    rows = await connection.fetch(
                        f"SELECT name, (SELECT count(*) FROM vectors_{table.number} WHERE index = name),"
                        " pg_relation_size(($1 || name)::regclass) FROM unnest($2::text[]) name",
                        *(f"vectors_{table.number}_", [name for name in FAMILY if FAMILY[name] == table.family]),
                    )
                    found.update({name: size for name, *size in rows})
            found["ocr"] = await connection.fetchrow("SELECT count(*), pg_total_relation_size('texts') FROM texts")
        return found

    async def duplicate_groups(self, tenant: str, page: Page, min_size: int) -> Found:
        """Return groups, largest first: the id, the size, and the image that was there first of each."""
        async with self.as_tenant(tenant) as connection:
            rows, total = await fetch_page(
                connection,
                "SELECT g.group_id::text, size, image_id, path, metadata, 1::double precision AS score FROM ("
                "SELECT group_id, count(*) AS size, min(number) AS first FROM images WHERE group_id IS NOT NULL GROUP BY 1"
                " HAVING count(*) >= $1) g JOIN images ON number = first ORDER BY size DESC, first",
                page,
                max(2, min_size),
            )
        return Found([(row["group_id"], row["size"], record(Hit, row)) for row in rows], total)

    async def duplicate_group(self, tenant: str, group_id: str) -> Found:
        """Return the first images of a group, with the cosine to the one that was there first; raise UnknownRecord."""
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
        return Found([record(Hit, row) for row in rows], rows[0]["size"])

    async def duplicate_statistics(self, tenant: str) -> tuple[int, int]:
        """Return the number of groups, and that of the images in them."""
        query = "SELECT count(*) AS size FROM images WHERE group_id IS NOT NULL GROUP BY group_id HAVING count(*) > 1"
        async with self.as_tenant(tenant) as connection:
            row = await connection.fetchrow(f"SELECT count(*), coalesce(sum(size), 0)::bigint FROM ({query}) groups")
        return row[0], row[1]


def _where(where: Filter, first: int) -> tuple[str, list[object]]:
    given = {"metadata @>": check_metadata(where.metadata) or None, "added_at >=": where.after, "added_at <": where.before}
    values = {left: value for left, value in given.items() if value is not None}
    return "".join(f" AND {left} ${number}" for number, left in enumerate(values, first)), list(values.values())


def _text_hit(row: Any, grams: set[str]) -> Hit:  # noqa: ANN401 - asyncpg's record
    lines = [TextPart(**line) for line in row["lines"]]
    best = max(lines, key=lambda line: jaccard(grams_of(line.text), grams))
    return record(Hit, row, line=best, full_text="\n".join(line.text for line in lines), num_lines=len(lines))
