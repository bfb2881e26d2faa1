"""Images: added, read and deleted, each with all of its parts in one transaction."""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import msgspec

from app.errors import SearchUnavailable, UnknownRecord
from app.search.engine import Added, Duplicate, FacePart, NewImage, ObjectPart, Page, States, StoredImage, TextPart, Vector
from app.search.postgres.connection import MAX_LISTED, Connection, locking
from app.search.postgres.values import check_metadata, check_text, folded, grams_of, record, to_uuid
from app.search.postgres.vectors import TWIN, Table, Vectors, active, begin_model, count, insert, nearest, states_of, tables

_MAX_TEXT, _MAX_GRAMS = 100_000, 50_000
_INSERT_PART = """
INSERT INTO parts (image, part_id, position, index, box, score, thumbnail, class_id, class_name, landmarks, quality)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
"""
_OF_CONTENT = "FROM images WHERE image_id = $1 AND content_hash = $2"
_REGISTERED = "number IN (SELECT image FROM parts WHERE name = $1)"


class Images(Vectors):
    """Images and what is in them."""

    async def add(
        self,
        tenant: str,
        image: NewImage,
        *,
        skip_duplicates: bool = True,
        near: float | None = None,
        completes: States | None = None,
    ) -> Added:
        """Add an image, replacing other content of its id; from the cosine `near` on, it joins the group of the nearest one.

        `completes`: it takes the place of the same one, if that is in these states yet: its time and group stay, and path and
        metadata if the new one has none.
        """
        async with self._writing(tenant, [image]) as (connection, known):
            old = completes and await connection.fetchrow(f"SELECT * {_OF_CONTENT}", image.image_id, image.content_hash)
            if old and await states_of(connection, old) == completes:
                image.path, image.metadata = image.path or old["path"], image.metadata or old["metadata"]
                added = await _add(connection, known, image, near=None if old["group_id"] else near, old=old)
                return added._replace(status="completed")
            twin = await connection.fetchrow(TWIN, image.content_hash, image.image_id, skip_duplicates, tenant)
            if twin and twin["is_same"]:
                return Added("duplicate", {}, Duplicate(*twin[:4]))
            return await _add(connection, known, image, near=near, is_there=twin is not None)

    async def register(self, tenant: str, name: str, images: Sequence[NewImage]) -> tuple[bool, Sequence[bool]]:
        """Add images whose faces get a name, in place of those with their ids; all or none.

        Return whether the name was there, and for each image whether it was.
        """
        check_text(name, "The name of a person")
        async with self._writing(tenant, images) as (connection, known):
            await connection.execute(locking((tenant, "name", name)))
            is_known: bool = await connection.fetchval("SELECT EXISTS (SELECT FROM parts WHERE name = $1)", name)
            replaced = [(await _add(connection, known, image)).status == "replaced" for image in images]
            await connection.execute(
                "UPDATE parts SET name = $1 WHERE landmarks IS NOT NULL"
                " AND image IN (SELECT number FROM images WHERE image_id = ANY ($2))",
                *(name, [image.image_id for image in images]),
            )
        return is_known, replaced

    async def names(self, tenant: str) -> Sequence[str]:
        """Return the names of faces, in order."""
        async with self.as_tenant(tenant) as connection:
            rows = await connection.fetch("SELECT DISTINCT name FROM parts WHERE name IS NOT NULL")
        return sorted(row["name"] for row in rows)

    async def forget(self, tenant: str, name: str, least: float | None, *, delete_images: bool = False) -> Sequence[str]:
        """Delete the images that are registered under a name, and others with faces like these if wanted; return the ids of those.

        These are, for each registered face, the nearest ones from the cosine `least` on, up to 1,000; none without it. If they
        are to be deleted, all is at once; raises UnknownRecord then if there is no such name. Otherwise, the name is deleted first.
        """
        others, like = set[str](), list[Vector]()
        check_text(name, "The name of a person")
        async with self.as_tenant(tenant) as connection:
            rows = await connection.fetch(f"SELECT image_id FROM images WHERE {_REGISTERED}", name)
            if delete_images and not rows:
                raise UnknownRecord("No face is registered under this name: find images by a picture (/faces/search)")
            if least is not None and (table := await active(connection, "face")):
                query = f"SELECT vector::vector FROM vectors_{table.number} JOIN parts ON part = part_id WHERE name = $1"
                like = [Vector(row["vector"], table.model) for row in await connection.fetch(query, name)]
            ids = {row["image_id"] for row in rows}
            if not delete_images:
                await _forget(connection, tenant, name, ids)
        async with self.as_tenant(tenant) as connection:  # which may take long
            joined = "JOIN images ON number = n.image JOIN parts ON part_id = part"
            select = f"SELECT image_id, n.score FROM n {joined} WHERE name IS NULL"
            for vector in like:
                if (table := await active(connection, "face")) is None or table.model != vector.model:
                    raise SearchUnavailable("The index has changed its model meanwhile")
                found = await nearest(connection, table, "faces", vector, Page(MAX_LISTED), select=select, is_exact=True)
                others.update(hit["image_id"] for hit in found if hit["score"] >= least)
        if delete_images:
            async with self.as_tenant(tenant) as connection:
                await _forget(connection, tenant, name, ids | others)
                await connection.execute("DELETE FROM images WHERE image_id = ANY ($1)", [*others])
        return sorted(others)

    @asynccontextmanager
    async def _writing(self, tenant: str, images: Sequence[NewImage]) -> AsyncIterator[tuple[Connection, Sequence[Table]]]:
        vectors = dict[Any, Vector]()
        for image in images:
            _check(image)
            vectors.update(("image", vector) for part in image.objects for vector in part.vectors)
            vectors.update(("image", vector) for vector in image.vectors)  # these last: they decide which model's index is made
            vectors.update(("face", vector) for face in image.faces for vector in face.vectors)
        locks = [(tenant, *key) for image in images for key in (("hash", image.content_hash), ("id", image.image_id))]
        while True:
            # Whoever comes second sees what the first one has added.
            async with self.as_tenant(tenant, *locks) as connection:
                known = await tables(connection)
                new = [family for family in vectors if family not in {table.family for table in known}]
                if not new:
                    yield connection, known
                    return
            async with self.as_owner() as connection:
                for family in new:
                    await begin_model(connection, family, vectors[family].model, len(vectors[family].values))

    async def rename(self, tenant: str, content_hash: bytes, image_id: str, new_id: str) -> None:
        """Give an image of this content another id, in place of the image that has it; do nothing if it is not there any more."""
        async with self.as_tenant(tenant, (tenant, "id", image_id), (tenant, "id", check_text(new_id, "image_id"))) as connection:
            if number := await connection.fetchval(f"SELECT number {_OF_CONTENT}", image_id, content_hash):
                await connection.execute("DELETE FROM images WHERE image_id = $1", new_id)
                await connection.execute("UPDATE images SET image_id = $2 WHERE number = $1", number, new_id)

    async def update(
        self, tenant: str, image_id: str, content_hash: bytes, path: str | None, metadata: Mapping[str, Any]
    ) -> Sequence[str] | None:
        """Change path and metadata of an image, if there are such and they are other ones.

        Return which were; None if the image is not there any more, or has another content.
        """
        async with self.as_tenant(tenant, (tenant, "id", image_id)) as connection:
            if (row := await connection.fetchrow(f"SELECT * {_OF_CONTENT}", image_id, content_hash)) is None:
                return None
            others = {"path": check_text(path or "", "The path of an image", 4096), "metadata": check_metadata(metadata)}
            changed = [name for name, value in others.items() if value and value != row[name]]
            for name in changed:
                await connection.execute(f"UPDATE images SET {name} = $2 WHERE number = $1", row["number"], others[name])
            for table in await tables(connection) if "metadata" in changed else ():
                await connection.execute(
                    f"UPDATE vectors_{table.number} SET metadata = $2 WHERE image = $1", row["number"], others["metadata"]
                )
        return changed

    async def image(self, tenant: str, image_id: str) -> StoredImage:
        """Return an image; raise UnknownRecord."""
        async with self.as_tenant(tenant) as connection:
            row = await _find(connection, image_id)
            parts = await connection.fetch("SELECT * FROM parts WHERE image = $1 ORDER BY position", row["number"])
            table = await active(connection, "image")
            vector = table and await connection.fetchval(
                f"SELECT vector::vector FROM vectors_{table.number} WHERE image = $1 AND part IS NULL", row["number"]
            )
            indexed, states = await count(connection, row["number"]), await states_of(connection, row)
        return record(
            StoredImage,
            row,
            states=states,
            indexed_in=list(indexed),
            full_text="\n".join(line["text"] for line in row["lines"]),
            objects=[record(ObjectPart, part) for part in parts if part["landmarks"] is None],
            faces=[record(FacePart, part) for part in parts if part["landmarks"] is not None],
            lines=[TextPart(**line) for line in row["lines"]],
            vector=vector,
        )

    async def delete(self, tenant: str, image_id: str) -> Mapping[str, int]:
        """Delete an image with all of its parts; return how many records there were, or raise UnknownRecord."""
        async with self.as_tenant(tenant, (tenant, "id", image_id)) as connection:
            number = (await _find(connection, image_id))["number"]
            counts = await count(connection, number)
            await connection.execute("DELETE FROM images WHERE number = $1", number)
        return counts

    async def thumbnail(self, tenant: str, image_id: str, part_id: str | None = None) -> bytes:
        """Return the thumbnail of an image or a face; raise UnknownRecord."""
        part = None if part_id is None else to_uuid(part_id, "face")
        async with self.as_tenant(tenant) as connection:
            found = await connection.fetchval(
                "SELECT CASE WHEN $2::uuid IS NULL THEN i.thumbnail ELSE p.thumbnail END FROM images i"
                " LEFT JOIN parts p ON p.image = number AND part_id = $2 WHERE image_id = $1",
                *(check_text(image_id, "image_id"), part),
            )
        if found is None:
            raise UnknownRecord("There is no such thumbnail")
        return bytes(found)


async def _forget(connection: Connection, tenant: str, name: str, ids: Collection[str]) -> None:
    await connection.execute(locking(*((tenant, "id", each) for each in ids)) + locking((tenant, "name", name)))  # as `register`
    await connection.execute(f"DELETE FROM images WHERE {_REGISTERED}", name)


def _check(image: NewImage) -> None:
    check_text(image.image_id, "image_id")
    check_text(image.path or "", "The path of an image", 4096)
    check_metadata(image.metadata)
    check_text("\n".join(line.text for line in image.lines or ()), "The text of an image", _MAX_TEXT)


async def _add(  # noqa: PLR0913 - what is known of an image
    connection: Connection,
    known: Sequence[Table],
    image: NewImage,
    *,
    near: float | None = None,
    old: Any = None,  # noqa: ANN401 - asyncpg's record
    is_there: bool = True,
) -> Added:
    is_there = is_there and await connection.fetchval("DELETE FROM images WHERE image_id = $1 RETURNING true", image.image_id)
    duplicate = None if near is None else await _nearest(connection, known, image.vectors, near)
    number = await connection.fetchval(
        "INSERT INTO images (image_id, content_hash, path, metadata, width, height, group_id, thumbnail, states, added_at)"
        " VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, coalesce($10, now())) RETURNING number",
        *(image.image_id, image.content_hash, image.path, image.metadata, image.width, image.height),
        *(UUID(duplicate.group_id) if duplicate else old["group_id"] if old else None, image.thumbnail, image.states),
        old and old["added_at"],
    )
    vectors: list[Any] = [(None, "global", None, image.vectors)]
    rows: list[tuple[object, ...]] = []
    part: Any
    for part in (*image.objects, *image.faces):
        part_id, index = uuid4(), part.index if isinstance(part, ObjectPart) else "faces"
        own = [getattr(part, name, None) for name in ("class_id", "class_name", "landmarks", "quality")]
        rows.append((number, part_id, len(rows), index, part.box, part.score, part.thumbnail, *own))
        if index is not None:
            vectors.append((part_id, index, own[1], part.vectors))
    if rows:
        await connection.executemany(_INSERT_PART, rows)
    indexed = await insert(connection, known, number, vectors)
    if image.lines:
        text = "\n".join(line.text for line in image.lines)
        await connection.execute(
            "INSERT INTO texts (image, lines, words, grams) VALUES ($1, $2, to_tsvector('simple', $3), $4)",
            *(number, msgspec.to_builtins(image.lines), folded(text), sorted(grams_of(text))[:_MAX_GRAMS]),
        )
        indexed["ocr"] = 1
    return Added("replaced" if is_there else "added", indexed, duplicate)


async def _find(connection: Connection, image_id: str) -> Any:  # noqa: ANN401 - asyncpg's record
    row = await connection.fetchrow(
        "SELECT images.*, group_id AS duplicate_group, coalesce(lines, '[]') AS lines FROM images LEFT JOIN texts ON image = number"
        " WHERE image_id = $1",
        check_text(image_id, "image_id"),
    )
    if row is None:
        raise UnknownRecord("There is no such image")
    return row


async def _nearest(connection: Connection, known: Sequence[Table], vectors: Sequence[Vector], near: float) -> Duplicate | None:
    for table in known:
        for vector in vectors:
            if (table.family, table.model, table.state) == ("image", vector.model, "active"):
                found = await nearest(connection, table, "global", vector, Page(1))
                if not found or found[0]["score"] < near:
                    return None
                row = await connection.fetchrow(
                    "UPDATE images SET group_id = coalesce(images.group_id, gen_random_uuid()) FROM images old"
                    " WHERE images.number = $1 AND old.number = $1"
                    " RETURNING images.image_id, images.path, $2::double precision, images.group_id::text, old.group_id IS NULL",
                    *(found[0]["image"], found[0]["score"]),
                )
                return row and Duplicate(*row)
    return None
