"""The port of search: what an engine keeps of images, and what it finds. `app.search.postgres` is the engine on PostgreSQL.

Everything belongs to a tenant, the first argument; nobody sees the records of another one. Every method raises SearchUnavailable if
the engine cannot be reached or does not answer in time. Scores of vectors are cosines, -1 to 1.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from msgspec import field
from numpy.typing import NDArray

VectorIndex = Literal["global", "vehicles", "people", "faces"]
"""Logical indexes of vectors: of whole images, of objects that are vehicles, of persons, of faces."""
Index = Literal["global", "vehicles", "people", "faces", "ocr"]
Family = Literal["image", "face"]
"""Which model makes vectors: `image` those of images and objects, `face` those of faces."""
FAMILY: Mapping[VectorIndex, Family] = {"global": "image", "vehicles": "image", "people": "image", "faces": "face"}


class Vector(NamedTuple):
    """A vector, and the model that made it; only vectors of the same model can be compared."""

    values: NDArray[np.float32]
    """(dimensions,) of length 1."""
    model: str
    """Reference with the version that answered, such as `embedding:1`."""


class Part(msgspec.Struct, kw_only=True):
    """An object or a face in an image."""

    box: tuple[float, float, float, float]
    """x1 y1 x2 y2 as fractions of the upright image."""
    score: float
    vectors: Sequence[Vector] = ()
    """None, one, or two while the index is being made anew with another model."""
    thumbnail: bytes | None = None


class ObjectPart(Part, kw_only=True):
    """An object; it is in an index of vectors if it has one."""

    class_id: int
    class_name: str
    index: VectorIndex | None = None


class FacePart(Part, kw_only=True):
    """A face."""

    landmarks: Sequence[float]
    """x y of five points as fractions of the image."""
    quality: float


class TextPart(msgspec.Struct, kw_only=True):
    """A line of text."""

    text: str
    corners: Sequence[float]
    """x y of four corners as fractions of the image."""
    score: float


class NewImage(msgspec.Struct, kw_only=True):
    """All that is kept of an image. It is written in one transaction: all of it or nothing."""

    image_id: str
    content_hash: bytes
    """32 bytes, of the encoded image."""
    path: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    width: int
    height: int
    vectors: Sequence[Vector] = ()
    objects: Sequence[ObjectPart] = ()
    faces: Sequence[FacePart] = ()
    lines: Sequence[TextPart] | None = None
    """In reading order; None if the text was not read."""
    thumbnail: bytes | None = None


class Duplicate(NamedTuple):
    """An image that is the same as one that is added, or nearly."""

    image_id: str
    path: str | None
    score: float
    """1 for the same content."""
    group_id: str | None = None
    """Of near duplicates."""
    is_new_group: bool = False
    """Whether the group was made for the two."""


class Added(NamedTuple):
    """What became of an image."""

    status: Literal["added", "replaced", "duplicate"]
    """`replaced`: there was one with its id, but other content."""
    indexed: Mapping[Index, int]
    duplicate: Duplicate | None = None
    """For `duplicate` the image that has the same content; otherwise the nearest one, if that is near enough."""


class Filter(NamedTuple):
    """Which images count. The default: all."""

    metadata: Mapping[str, Any] = {}
    """What the metadata contain."""
    after: datetime | None = None
    before: datetime | None = None
    """When they were added."""
    classes: Collection[str] = ()
    """Names of classes of objects; all if empty. Only for `vehicles` and `people`."""
    is_registered: bool = False
    """Only faces that have a name."""


EVERYTHING = Filter()
MAX_LISTED = 1000
"""So many images of a group are listed."""


class Page(NamedTuple):
    """A part of a list."""

    size: int
    offset: int = 0


class Hit(msgspec.Struct, kw_only=True):
    """What a search has found: an image, or an object or a face in it."""

    image_id: str
    path: str | None
    score: float
    metadata: dict[str, Any]
    part_id: str | None = None
    """Of the object or face."""
    box: Sequence[float] | None = None
    part_score: float | None = None
    """Of the detector."""
    class_id: int | None = None
    class_name: str | None = None
    name: str | None = None
    """Under which the face was registered."""
    line: TextPart | None = None
    """The line of text that matches best."""
    full_text: str | None = None
    num_lines: int | None = None


class Found(NamedTuple):
    """A page of a list, and how long that is."""

    items: Sequence[Any]
    total: int


class StoredImage(msgspec.Struct, kw_only=True):
    """What is kept of an image."""

    image_id: str
    path: str | None
    metadata: dict[str, Any]
    content_hash: bytes
    width: int
    height: int
    added_at: datetime
    indexed_in: Sequence[Index]
    objects: Sequence[ObjectPart]
    faces: Sequence[FacePart]
    lines: Sequence[TextPart]
    full_text: str
    vector: NDArray[np.float32] | None
    duplicate_group: str | None


class IndexStatistics(NamedTuple):
    """Size of an index. The bytes are those of all tenants."""

    name: Index
    records: int
    nbytes: int


class DuplicateGroup(NamedTuple):
    """Images that are nearly the same; the first one was there first."""

    group_id: str
    images: Sequence[Hit]
    """The first ones, in a list of groups the first one only; `score`: the cosine to the first one."""
    size: int
    """Number of all images."""


class Job(msgspec.Struct, kw_only=True):
    """Work that goes on without a request: whoever runs it may die; another worker then goes on where it was."""

    job_id: str
    tenant: str
    kind: Literal["directory", "reindex"]
    options: dict[str, Any]
    state: Literal["waiting", "running", "done", "failed"] = "waiting"
    position: str = ""
    """How far it has come, in whatever its kind counts: everything up to there is done, or counted as failed."""
    counts: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    claim: int = 0
    """How often it was taken; who took it last may save it."""
    created_at: datetime
    ended_at: datetime | None = None


class ModelsInUse(NamedTuple):
    """References of the models of a family; None if there is none."""

    active: str | None
    """Its vectors are searched."""
    next: str | None
    """Its vectors are being made; new images get both."""


class SearchEngine(Protocol):
    """An engine."""

    async def open(self) -> None:
        """Connect, and bring the schema up to date."""

    async def close(self) -> None:
        """Give back everything."""

    # Models, of all tenants

    async def models(self, family: Family) -> ModelsInUse:
        """Return the models whose vectors are kept. The first vector that is added makes its model the active one."""

    async def begin_model(self, family: Family, model: str, dimensions: int) -> None:
        """Keep vectors of another model beside those of the active one.

        Raises:
            InvalidParameter: Yet another model is being added.
            IndexRefused: The database would damage its index.
        """

    async def images_without(self, family: Family, after: str, limit: int) -> Sequence[tuple[str, str, str | None]]:
        """Return tenant, id and path of images that have a vector of the active model, but none of the next one.

        They are in a fixed order; `after` is the last one of the page before, as `tenant/image_id`.
        """

    async def add_vectors(self, tenant: str, image_id: str, content_hash: bytes, parts: Mapping[str | None, Vector]) -> bool:
        """Add vectors of the next model: of the image (None), and of its parts by their ids; False if it has changed meanwhile."""

    async def parts(self, tenant: str, image_id: str, family: Family) -> Mapping[str | None, Sequence[float]]:
        """Return the box of each part of an image that has a vector of a family, and None for the image itself.

        For faces, it is followed by the landmarks.
        """

    async def end_model(self, family: Family, *, switch: bool) -> None:
        """Search the vectors of the next model and drop those of the active one; or, without `switch`, the reverse."""

    # Images

    async def add(self, tenant: str, image: NewImage, *, skip_duplicates: bool = True, near: float | None = None) -> Added:
        """Add an image. The same id with the same content is a duplicate of itself; with other content, it is replaced.

        `near`: cosine from which it joins the group of the nearest image.
        """

    async def find_content(self, tenant: str, content_hash: bytes) -> Duplicate | None:
        """Return the image with this content, so that no model need be asked about it again."""

    async def image(self, tenant: str, image_id: str) -> StoredImage:
        """Return an image; raise UnknownRecord."""

    async def delete(self, tenant: str, image_id: str) -> Mapping[Index, int]:
        """Delete an image with its objects, faces, text and vectors; return how many there were. Raise UnknownRecord."""

    async def thumbnail(self, tenant: str, image_id: str, part_id: str | None = None) -> bytes:
        """Return the thumbnail of an image or a face; raise UnknownRecord."""

    # Search

    async def nearest(  # noqa: PLR0913 - the parts of a question
        self, tenant: str, index: VectorIndex, vector: Vector, page: Page, *, min_score: float = -1, where: Filter = EVERYTHING
    ) -> Sequence[Hit]:
        """Return what is nearest, by descending score; SearchUnavailable if the index has vectors of other models only."""

    async def match_text(self, tenant: str, words: str, page: Page, *, is_fuzzy: bool = False, where: Filter = EVERYTHING) -> Found:
        """Return the images whose text contains the words, best first; `is_fuzzy`: or similar ones, also of Chinese."""

    async def statistics(self, tenant: str) -> Sequence[IndexStatistics]:
        """Return the size of each index."""

    # Near duplicates

    async def duplicate_groups(self, tenant: str, page: Page, min_size: int) -> Found:
        """Return groups, largest first."""

    async def duplicate_group(self, tenant: str, group_id: str) -> DuplicateGroup:
        """Return a group; raise UnknownRecord."""

    async def duplicate_statistics(self, tenant: str) -> tuple[int, int]:
        """Return the number of groups, and that of the images in them."""

    # Names of faces

    async def register(self, tenant: str, name: str, images: Sequence[NewImage]) -> bool:
        """Add images whose faces get a name, in place of those with their ids; all or none. Return whether the name was there."""

    async def names(self, tenant: str) -> Sequence[str]:
        """Return the names of faces, in order."""

    async def forget(self, tenant: str, name: str) -> None:
        """Delete the images that have a face with a name."""

    # Jobs

    async def add_job(self, tenant: str, kind: Literal["directory", "reindex"], options: dict[str, Any]) -> Job:
        """Add a job, which waits; GatewayFull if too many have not ended. Those that ended a month ago are forgotten."""

    async def claim_job(self, seconds: float) -> Job | None:
        """Take the job, of any tenant, that has waited longest, or was not saved for so many seconds; None if there is none."""

    async def save_job(self, job: Job) -> bool:
        """Save state, position and counts, and with that say that it is being worked on; False if another worker has taken it."""

    async def job(self, tenant: str, job_id: str) -> Job:
        """Return a job; raise UnknownRecord."""

    async def jobs(self, tenant: str, page: Page) -> Found:
        """Return jobs, newest first."""
