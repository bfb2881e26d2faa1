"""Two tenants in one database: whatever one asks, nothing of the other is in the answer, or changes."""

import inspect
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from app.errors import InvalidParameter, UnknownRecord
from app.search.engine import FacePart, Filter, NewImage, ObjectPart, Page, TextPart, Vector, VectorIndex
from app.search.postgres.engine import PostgresEngine

TENANTS = {"north": "one", "south": "two"}
"""What the ids of their images begin with."""
DIMENSIONS = 8
WHOLE = (0.0, 0.0, 1.0, 1.0)
POINTS = (0.3, 0.4, 0.7, 0.4, 0.5, 0.6, 0.35, 0.8, 0.65, 0.8)
EVERY_PAGE = Page(200)
_BLOCK = 25
"""Requests of one tenant after which is looked at what the other one has."""

OF_ALL_TENANTS = {"open", "close", "models", "begin_model", "images_without", "end_model", "claim_job", "save_job"}
"""Methods without a tenant: only jobs of a worker call them."""


class Ids(NamedTuple):
    """What a tenant has, by its ids."""

    images: list[str]
    parts: list[str]
    groups: list[str]
    jobs: list[str]


def vector(source: random.Random, model: str) -> Vector:
    values = np.array([source.gauss(0, 1) for _ in range(DIMENSIONS)], np.float32)
    return Vector(values / np.linalg.norm(values), model)


def new_image(source: random.Random, tenant: str, image_id: str) -> NewImage:
    """Make an image with all parts. Vectors, words and contents are the same for all tenants, if the source is."""
    kinds: list[tuple[str, VectorIndex]] = [("car", "vehicles"), ("person", "people")]
    objects = [
        ObjectPart(box=WHOLE, score=0.9, vectors=[vector(source, "embedding:1")], class_id=place, class_name=name, index=index)
        for place, (name, index) in enumerate(kinds)
    ]
    faces = [FacePart(box=WHOLE, score=0.9, vectors=[vector(source, "faces:1")], landmarks=POINTS, quality=0.8) for _ in range(2)]
    return NewImage(
        image_id=image_id,
        content_hash=source.randbytes(32),
        path=f"/{tenant}/{image_id}.jpg",
        metadata={"of": tenant, "place": "hall"},
        width=640,
        height=480,
        vectors=[vector(source, "embedding:1")],
        objects=objects,
        faces=faces,
        lines=[
            TextPart(text="quiet exit", corners=(0, 0, 1, 0, 1, 1, 0, 1), score=0.9),
            TextPart(text=f"of {tenant}", corners=(0, 0, 1, 0, 1, 1, 0, 1), score=0.9),
        ],
        thumbnail=tenant.encode(),
    )


async def fill(engine: PostgresEngine, tenant: str, images: int = 9) -> Ids:
    """Add images, some of them with ids that the other tenant uses, too; register faces, and start a job."""
    source = random.Random(7)  # noqa: S311 - not a secret
    ids = [f"{TENANTS[tenant]}-{number}" for number in range(images - 3)] + [f"same-{number}" for number in range(3)]
    for image_id in ids:
        await engine.add(tenant, new_image(source, tenant, image_id), near=0)
    registered = new_image(source, tenant, f"{TENANTS[tenant]}-face")
    await engine.register(tenant, f"Ada of {tenant}", [registered])
    faces = [str(hit.part_id) for hit in await engine.nearest(tenant, "faces", vector(source, "faces:1"), EVERY_PAGE)]
    job = await engine.add_job(tenant, "directory", {"directory": f"/{tenant}"})
    groups = (await engine.duplicate_groups(tenant, EVERY_PAGE, 2)).items
    assert groups
    return Ids(ids, faces, [one.group_id for one in groups], [job.job_id])


async def everything(engine: PostgresEngine, tenant: str) -> list[Any]:
    """Return all that a tenant has."""
    probe = Vector(np.full(DIMENSIONS, DIMENSIONS**-0.5, np.float32), "embedding:1")
    ids = sorted({hit.image_id for hit in await engine.nearest(tenant, "global", probe, EVERY_PAGE)})
    found: list[Any] = [await engine.image(tenant, image_id) for image_id in ids]
    found += [await engine.names(tenant), (await engine.jobs(tenant, EVERY_PAGE)).items]
    found += [[one.records for one in await engine.statistics(tenant)]]
    return [plain(one) for one in found]


def plain(answer: Any) -> Any:  # noqa: ANN401
    return msgspec.to_builtins(answer, builtin_types=(bytes,), enc_hook=lambda array: np.asarray(array).round(3).tolist())


def strings(answer: Any) -> set[str]:  # noqa: ANN401
    """Return all strings in an answer of the engine."""
    if isinstance(answer, Mapping):
        return set().union(*(strings(each) for pair in answer.items() for each in pair))
    if isinstance(answer, str | bytes):
        return {answer if isinstance(answer, str) else answer.decode("latin-1")}
    if isinstance(answer, Sequence):
        return set().union(*map(strings, answer))
    return set()


def requests(
    engine: PostgresEngine, source: random.Random, tenant: str, own: Ids, other: Ids
) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Return a call of each method that has a tenant, with arguments of which some are the other one's."""

    def any_of(kind: str) -> str:
        return str(source.choice([*getattr(own, kind), *getattr(other, kind), *getattr(other, kind)]))

    image = new_image(source, tenant, source.choice([*other.images, f"{TENANTS[tenant]}-new"]))
    index = source.choice(["global", "vehicles", "people", "faces"])
    asked = vector(source, "faces:1" if index == "faces" else "embedding:1")
    page = Page(source.choice([1, 10, 200]), source.choice([0, 0, 5]))
    where = source.choice(
        [
            Filter(),
            Filter(is_registered=True),
            *(Filter(metadata=given) for given in ({"place": "hall"}, {"of": "north"}, {"of": "south"})),
        ]
    )
    words = source.choice(["quiet", "exit north", "south", "quite exlt", "of"])
    part = source.choice([None, any_of("parts")])
    return {
        "add": lambda: engine.add(tenant, image, skip_duplicates=source.random() < 0.5, near=source.choice([None, -1, 0.5])),
        "find_content": lambda: engine.find_content(tenant, image.content_hash),
        "image": lambda: engine.image(tenant, any_of("images")),
        "delete": lambda: engine.delete(tenant, any_of("images")),
        "thumbnail": lambda: engine.thumbnail(tenant, any_of("images"), part),
        "nearest": lambda: engine.nearest(tenant, index, asked, page, where=where),  # type: ignore[arg-type]
        "match_text": lambda: engine.match_text(tenant, words, page, is_fuzzy=source.random() < 0.5, where=where),
        "statistics": lambda: engine.statistics(tenant),
        "add_vectors": lambda: engine.add_vectors(tenant, any_of("images"), image.content_hash, {part: asked}),
        "parts": lambda: engine.parts(tenant, any_of("images"), source.choice(["image", "face"])),
        "duplicate_groups": lambda: engine.duplicate_groups(tenant, page, 1),
        "duplicate_group": lambda: engine.duplicate_group(tenant, any_of("groups")),
        "duplicate_statistics": lambda: engine.duplicate_statistics(tenant),
        "register": lambda: engine.register(tenant, f"{source.choice(['Ada', 'Bo'])} of {tenant}", [image]),
        "names": lambda: engine.names(tenant),
        "forget": lambda: engine.forget(tenant, f"{source.choice(['Ada', 'Bo'])} of {source.choice([*TENANTS])}"),
        "add_job": lambda: engine.add_job(tenant, "directory", {"directory": f"/{tenant}"}),
        "job": lambda: engine.job(tenant, any_of("jobs")),
        "jobs": lambda: engine.jobs(tenant, page),
    }


def test_every_method_is_asked() -> None:
    """A new method of the engine has to be added to the requests."""
    methods = {name for name, _ in inspect.getmembers(PostgresEngine, inspect.iscoroutinefunction) if not name.startswith("_")}
    nobody = Ids(["x"], ["x"], ["x"], ["x"])
    source = random.Random(1)  # noqa: S311
    assert requests(PostgresEngine(""), source, "north", nobody, nobody).keys() | OF_ALL_TENANTS == methods


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.system)])
async def test_images_of_another_tenant_are_not_found_or_changed(engine: PostgresEngine, count: int) -> None:
    """Random requests with ids of both, over all methods of the engine."""
    ids = {tenant: await fill(engine, tenant) for tenant in TENANTS}
    source = random.Random(count)  # noqa: S311
    asked, refused = 0, 0
    for _ in range(count // _BLOCK):
        tenant, other = source.sample([*TENANTS], 2)
        others = {mark for kind in ids[other][1:] for mark in kind}  # both may have images of one id
        before = await everything(engine, other)
        for _ in range(_BLOCK):
            name, call = source.choice(list(requests(engine, source, tenant, ids[tenant], ids[other]).items()))
            try:
                found = strings(plain(await call()))
            except (UnknownRecord, InvalidParameter):
                refused += 1
            else:
                asked += 1
                assert not found & others, name
                assert not [text for text in found if other in text], name
        assert await everything(engine, other) == before
    assert min(asked, refused) > count / 10
