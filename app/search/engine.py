"""What the engine of search, `app.search.postgres`, keeps of images, and what it finds; scores of vectors are cosines, -1 to 1."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from msgspec import field
from numpy.typing import NDArray

VectorIndex = Literal["global", "vehicles", "people", "faces"]
"""Logical indexes of vectors: of whole images, of objects that are vehicles, of persons, of faces."""
Index = Literal["global", "vehicles", "people", "faces", "ocr"]
Family = Literal["image", "face"]
"""Which model makes vectors: `image` those of images and objects, `face` those of faces."""
PART_OF: Mapping[Family, str] = {"image": "embedding", "face": "face_embeddings"}
"""The part of an image, in its states, whose vectors are of a family."""
FAMILY: Mapping[VectorIndex, Family] = {"global": "image", "vehicles": "image", "people": "image", "faces": "face"}

States = Mapping[str, Mapping[str, str]]
"""By part, as far as it was wanted: `state` (`there`, `none`: nothing was found, `left_out`), and `model`, or `why`."""


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
    width: int = 0
    height: int = 0
    vectors: Sequence[Vector] = ()
    norm: float | None = None
    """Length of the model's own vector of the image. It is not kept."""
    objects: Sequence[ObjectPart] = ()
    faces: Sequence[FacePart] = ()
    lines: Sequence[TextPart] | None = None
    """In reading order; None if the text was not read."""
    thumbnail: bytes | None = None
    states: dict[str, dict[str, str]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    """Why parts are missing, by part; `truncated`: some of them. As far as they are kept, they are in `states`, too."""


class Duplicate(NamedTuple):
    """An image that is the same as one that is added, or nearly."""

    image_id: str
    path: str | None
    score: float
    """1 for the same content."""
    group_id: str | None = None
    is_new_group: bool = False


class ModelsInUse(NamedTuple):
    """References of the models of a family; None if there is none."""

    active: str | None
    """Its vectors are searched."""
    next: str | None
    """Its vectors are being made; new images get both."""


Models: TypeAlias = Mapping[Family, ModelsInUse]


class Known(NamedTuple):
    """An image with a content that is known."""

    duplicate: Duplicate
    states: States | None
    """None for one that was added before these were kept."""
    lacks: Mapping[Family, str]
    """The next models of which it has no vectors, or not of all parts."""


class Added(NamedTuple):
    """What became of an image."""

    status: Literal["added", "replaced", "completed", "duplicate"]
    """`replaced`: there was one with its id, but other content; `completed`: this one, without some of its parts."""
    indexed: Mapping[str, int]
    duplicate: Duplicate | None = None
    """For `duplicate` the image that has the same content; otherwise the nearest one, if that is near enough."""
    updated: Sequence[str] = ()
    """For `duplicate`: `path`, `metadata`, if they were other ones."""


class Filter(NamedTuple):
    """Which images count, by default all; `after` and `before` are times at which they were added."""

    metadata: Mapping[str, Any] = {}
    after: datetime | None = None
    before: datetime | None = None
    classes: Collection[str] = ()
    """Names of classes of objects; all if empty. Only for `vehicles` and `people`."""
    is_registered: bool = False
    """Only faces that have a name."""


EVERYTHING = Filter()


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


class StoredImage(NewImage, kw_only=True):
    """What is kept of an image."""

    added_at: datetime
    indexed_in: Sequence[Index]
    full_text: str
    vector: NDArray[np.float32] | None
    states: States | None  # type: ignore[assignment]
    """None for one that was added before these were kept."""
    duplicate_group: str | None


class Job(msgspec.Struct, kw_only=True):
    """Work that goes on without a request: whoever runs it may die; another worker then goes on where it was."""

    job_id: str
    tenant: str
    kind: Literal["directory", "reindex"]
    options: dict[str, Any]
    folders: dict[str, int] = field(default_factory=dict)
    """Which whoever takes it must have, by the numbers of `Files.identify`."""
    state: Literal["waiting", "running", "done", "failed"] = "waiting"
    position: str = ""
    """How far it has come, in whatever its kind counts: everything up to there is done, or counted as failed."""
    counts: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    claim: int = 0
    """How often it was taken; who took it last may save it."""
    deaths: int = 0
    """How many processes have ended while they worked on what follows the position."""
    created_at: datetime
    ended_at: datetime | None = None


class FileFailure(msgspec.Struct, frozen=True):
    """What a job could not do: a file that was not indexed, or an image that was not described anew."""

    name: str
    code: str
    why: str
