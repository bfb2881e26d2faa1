"""All that search keeps of an image, from one decoded image: objects, faces, lines of text, and vectors of them."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import or_
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from app.cascade.answers import expect_faces, expect_vector, read_lines, to_fractions
from app.cascade.catalog import Catalog
from app.cascade.crops import cut_boxes
from app.cascade.definition import MAX_CROPS, Cascade, Step
from app.cascade.named import PART_OF, all_parts, named_cascade
from app.cascade.run import CascadeAnswer, ask_about_each, run_cascade
from app.errors import GatewayError, InvalidParameter, NotOffered, UnknownModel, UnknownVersion, UnsupportedModel, WrongTask
from app.imaging.patch import Patch
from app.imaging.thumbnail import to_thumbnail
from app.model.heads import DetectionHead, EmbeddingHead
from app.model.reference import refer_to, split_reference
from app.model.spec import ModelSpec
from app.pipeline.call import CallContext, TaskOptions
from app.pipeline.pipeline import Pipeline
from app.pipeline.results import Detections, Embedding, StepResult
from app.search.database import Database
from app.search.engine import FacePart, Family, Models, NewImage, ObjectPart, States, TextPart, Vector, VectorIndex
from app.search.files import Files
from app.telemetry.metrics import Metrics

_VEHICLES = ("bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat")
INDEX_OF: Mapping[str, VectorIndex] = {"person": "people", **dict.fromkeys(_VEHICLES, "vehicles")}
"""The index of objects of a class, by its name, in the order of COCO's ids from 0; others are in none."""

_IMAGE_SIDE, _FACE_SIDE = 256, 112
_OBJECT_CONFIDENCE, FACE_CONFIDENCE = 0.25, 0.5
_FAMILIES: Mapping[str, Family] = {"image": "image", "object_embeddings": "image", "descriptions": "face"}
"""Steps whose answers are vectors, and of which family."""
_NEXT = "_next"
"""What the name of a step ends with that gives a vector of the next model."""
_LASTING = (UnknownModel, UnknownVersion, UnsupportedModel, WrongTask, NotOffered)
"""A part is left out if its model is not there, or not fit; any other failure may be over at the next attempt."""


class Parts(NamedTuple):
    """Which parts of an image are described."""

    objects: bool = True
    faces: bool = True
    text: bool = True
    vectors: bool = True
    """Of the image and its objects."""


ALL = Parts()


_PARTS = {"detections"}, {"faces", "face_embeddings"}, {"ocr"}, {"embedding"}
"""Names in answers and states, in the order of `Parts`."""


def is_kept(states: States, part: str) -> bool:
    """Return whether nothing of a part is missing."""
    return states.get(part, {}).get("state") in {"there", "none"}


class SearchOptions(NamedTuple):
    """The settings of search."""

    database_url: str
    folders: tuple[Path, ...]
    excluded: tuple[str, ...]
    keeps_thumbnails: bool
    has_faces: bool
    max_image_bytes: int
    connections: int
    """That this worker may have to the database."""


class Describer(Database):
    """Describes images by the models whose vectors are searched, or by the default ones as long as there are none."""

    def __init__(self, options: SearchOptions, pipeline: Pipeline, catalog: Catalog, metrics: Metrics) -> None:
        super().__init__(options.database_url, options.connections, metrics)
        self.options, self.pipeline, self.catalog = options, pipeline, catalog
        self.files = Files(options.folders, options.excluded, options.max_image_bytes)

    async def image_vector(self, image: bytes, call: CallContext) -> Vector:
        """Return the vector of a whole image; errors are those of `Pipeline.run`."""
        return _to_vector(await self.pipeline.run(image, _question(await self._model("image", call)), call))

    async def among_images(self, text: Embedding, call: CallContext) -> Vector:
        """Return the vector of a text as one of the images' model; raise UnsupportedModel if they cannot be compared."""
        if (active := await self.active_model("image", call)) is None:
            return Vector(text.vector, "")
        dimensions = (await self._spec(active, call)).expect_head(EmbeddingHead).dimensions
        if dimensions != len(text.vector):
            numbers = f"{len(text.vector)} numbers, {active} describes images by {dimensions}"
            raise UnsupportedModel(f"texts cannot be compared with images: {text.spec.name} describes them by {numbers}")
        return Vector(text.vector, active)

    async def objects(self, image: bytes, call: CallContext) -> Sequence[ObjectPart]:
        """Return the vehicles and people in an image, with vectors, by descending score; errors are those of `run_cascade`."""
        cascade = await self._of_models(await self._cascade(Parts(faces=False, text=False), call), call)
        found = await run_cascade(self.pipeline, cascade.without("image"), image, call, self.metrics)
        if "object_embeddings" in cascade.steps:
            found.require("object_embeddings")
        return [part for part in _read_objects(found) if part.vectors]

    async def faces(self, image: bytes, call: CallContext, confidence: float = FACE_CONFIDENCE) -> Sequence[FacePart]:
        """Return the faces in an image by descending score, within the limit of crops with vectors; errors as `run_cascade`."""
        cascade = await self._of_models(self._faces_cascade().vary(faces={"confidence": confidence}), call)
        found = await run_cascade(self.pipeline, cascade, image, call, self.metrics)
        found.require("descriptions")
        return _read_faces(found)

    async def match_distance(self, call: CallContext) -> float:
        """Return the distance up to which vectors of faces match; raise UnsupportedModel if the model's config does not say it."""
        spec = await self._spec(await self._model("face", call), call)
        if spec.match_distance is None:
            raise UnsupportedModel(f"the config of {spec.name} must say `match_distance`, the distance up to which faces match")
        return spec.match_distance

    async def describe(self, new: NewImage, image: bytes, call: CallContext, wanted: Parts, used: Models | None = None) -> None:
        """Fill in all that models say of an image, but for parts whose model is not there; errors are those of `run_cascade`."""
        cascade = await self._of_models(await self._cascade(wanted, call), call, used, is_new=True)
        if [*cascade.steps] == ["image"] and not self.options.keeps_thumbnails:  # decoded at a reduced size
            found = await self.pipeline.run(image, _question(cascade.model), call)
            new.width, new.height, new.vectors, new.norm = found.width, found.height, [_to_vector(found)], found.norm
            new.states = {"embedding": {"state": "there", "model": new.vectors[0].model}}
            return
        async with self.pipeline.decoded(image, call) as decoded:
            given: Any = {"patch": decoded, "hurried": [name for name in cascade.steps if name.endswith(_NEXT)]}
            _fill(new, await run_cascade(self.pipeline, cascade, image, call, self.metrics, **given))
            if self.options.keeps_thumbnails:
                leases = [] if decoded.memory is None else [decoded.memory]
                work = partial(_add_thumbnails, new, decoded)
                await self.pipeline.threads.run(work, call.deadline, *leases, turn=call.turn(new.width * new.height))

    async def first_model(self, wanted: Parts, call: CallContext) -> str:
        """Return the first model for these parts of an image that is there, or the first; raise InvalidParameter for no parts."""
        cascade = await self._of_models(await self._cascade(wanted, call), call)
        for step in cascade.steps.values():
            with suppress(*_LASTING):
                await self._spec(step.model, call)
                return step.model
        return cascade.model

    async def to_complete(self, wanted: Parts, states: States | None, call: CallContext) -> Parts:
        """Return the parts to describe of an image in these states if it lacks some whose models are there now; else none."""
        kept = {part for part in PART_OF.values() if states is None or is_kept(states, part)}
        lacking = {*PART_OF.values()} - kept
        missing = _among(lacking, wanted._replace(faces=wanted.faces and self.options.has_faces))
        if any(missing):
            cascade = await self._of_models(await self._cascade(missing, call), call)
            for name, step in cascade.steps.items():
                try:
                    await self._spec(step.model, call)
                except _LASTING:
                    lacking.discard(PART_OF.get(name, "ocr"))
            missing = _among(lacking, missing)
        return Parts(*map(or_, missing, _among(kept))) if any(missing) else missing

    async def describe_parts(
        self, image: bytes, parts: Mapping[str | None, Sequence[float]], reference: str, call: CallContext
    ) -> dict[str | None, Vector]:
        """Return vectors of parts of an image by a model: of boxes, which landmarks follow for faces; None is the whole image."""
        spec = await self._spec(reference, call)
        async with self.pipeline.decoded(image, call) as decoded:
            size = np.array(decoded.image.shape[1::-1], np.float32)
            patches = [
                decoded._replace(landmarks=np.array(part[4:], np.float32).reshape(-1, 2) * size)
                if len(part) > 4  # noqa: PLR2004 - a box
                else cut_boxes(decoded, [part or (0, 0, 1, 1)])[0]
                for part in parts.values()
            ]
            found = await ask_about_each(self.pipeline, patches, spec, _question(reference), call)
        return dict(zip(parts, map(_to_vector, found), strict=True))

    async def newest_model(self, family: Family, call: CallContext) -> ModelSpec:
        """Return the spec of the default model of a family; errors are those of `Pipeline.prepare`."""
        return await self._spec(self._default_model(family), call)

    async def _model(self, family: Family, call: CallContext) -> str:
        return await self.active_model(family, call) or self._default_model(family)

    def _default_model(self, family: Family) -> str:
        if family == "face":
            return self._faces_cascade().steps["descriptions"].model
        return named_cascade(self, "embedding", "image").steps["image"].model

    async def _spec(self, reference: str, call: CallContext) -> ModelSpec:
        return await self.pipeline.prepare(self.pipeline.refer_to(*split_reference(reference)), call.deadline, call.caller)

    async def _cascade(self, wanted: Parts, call: CallContext) -> Cascade:
        detector = Step(model=self.pipeline.default_for(DetectionHead.task), confidence=_OBJECT_CONFIDENCE)
        objects, faces = detector if wanted.objects else None, FACE_CONFIDENCE if wanted.faces and self.options.has_faces else None
        steps = all_parts(self, objects, has_vectors=wanted.vectors, face_confidence=faces, has_text=wanted.text)
        if not steps:
            raise InvalidParameter("there is nothing to be indexed: all parts are switched off, or faces only, which are off here")
        cascade = Cascade(name="search", steps=steps)
        with suppress(*_LASTING):  # of which the step tells
            if "object_embeddings" in steps:
                labels = (await self._spec(detector.model, call)).labels
                classes = tuple(label for label in INDEX_OF if label in labels)
                return cascade.vary(object_embeddings={"classes": classes}) if classes else cascade.without("object_embeddings")
        return cascade

    def _faces_cascade(self) -> Cascade:
        return named_cascade(self, "faces", "faces", "descriptions")

    async def _of_models(self, cascade: Cascade, call: CallContext, used: Models | None = None, *, is_new: bool = False) -> Cascade:
        # Of new images, the models to which search changes get steps of their own.
        steps, named = dict(cascade.steps), {name: _FAMILIES[name] for name in cascade.steps if name in _FAMILIES}
        used = used or {family: await self.asking(call).models(family) for family in {*named.values()}}
        for name, family in named.items():
            step, models = cascade.steps[name], used[family]
            steps[name] = msgspec.structs.replace(step, model=models.active or step.model)
            if is_new and models.next:
                steps[name + _NEXT] = msgspec.structs.replace(step, model=models.next)
        return msgspec.structs.replace(cascade, steps=steps)


def _among(names: Collection[str], wanted: Parts = ALL) -> Parts:
    return Parts(*(is_wanted and not part.isdisjoint(names) for is_wanted, part in zip(wanted, _PARTS, strict=True)))


def _question(reference: str) -> TaskOptions[Embedding]:
    name, version = split_reference(reference)
    return TaskOptions("embedding", name, version=int(version) if version else None)


def _to_vector(found: StepResult) -> Vector:
    own = expect_vector(found)
    return Vector(own.vector, refer_to(own.spec.name, own.version))


def _vectors(found: CascadeAnswer, step: str) -> Mapping[int, list[Vector]]:
    # By the index of the object; of an image at 0.
    vectors: dict[int, list[Vector]] = defaultdict(list)
    for answer in filter(None, map(found.steps.get, (step, step + _NEXT))):
        for index, result in zip(answer.objects or (0,), answer.results, strict=False):
            vectors[index].append(_to_vector(result))
    return vectors


def _read_objects(found: CascadeAnswer) -> list[ObjectPart]:
    (result,) = found.require("objects").results
    if not isinstance(result, Detections):
        raise WrongTask(f"{result.spec.name} finds no objects")
    vectors, boxes = _vectors(found, "object_embeddings"), to_fractions(result.boxes, result.width, result.height)
    parts: list[ObjectPart] = []
    for index, (box, score, class_id) in enumerate(zip(boxes, result.scores.tolist(), result.class_ids.tolist(), strict=True)):
        own: Any = {"box": (*box,), "score": round(score, 4), "class_id": class_id, "vectors": vectors.get(index, ())}
        name = result.spec.class_name(class_id)
        parts.append(ObjectPart(**own, class_name=name, index=INDEX_OF.get(name) if index in vectors else None))
    return parts


def _read_faces(found: CascadeAnswer) -> list[FacePart]:
    result, points = expect_faces(found.require("faces").results[0])
    vectors = _vectors(found, "descriptions")
    places: Any = [to_fractions(each, result.width, result.height) for each in (result.boxes, points)]
    rows = zip(*places, result.scores.tolist(), result.qualities.tolist(), strict=True)
    return [
        FacePart(box=(*box,), landmarks=own, score=round(score, 4), quality=round(quality, 4), vectors=vectors.get(index, ()))
        for index, (box, own, score, quality) in enumerate(rows)
    ]


def _read_lines(found: CascadeAnswer) -> list[TextPart]:
    where, lines = read_lines(found)
    corners = to_fractions(where.corners, where.width, where.height)
    return [TextPart(text=line.text, corners=corners[index], score=round(line.score, 4)) for index, line in lines]


_READERS: Mapping[str, tuple[str, Callable[[CascadeAnswer], Sequence[Any]]]] = {
    "image": ("vectors", lambda found: _vectors(found, "image").get(0, ())),
    "objects": ("objects", _read_objects),
    "object_embeddings": ("objects", _read_objects),
    "faces": ("faces", _read_faces),
    "descriptions": ("faces", _read_faces),
    "text": ("lines", _read_lines),
}
"""By step: the field of an image that is read from its answer."""


def _fill(new: NewImage, found: CascadeAnswer) -> None:
    new.width, new.height = found.width, found.height
    for name in found.steps:
        if (step := name.removesuffix(_NEXT)) in _READERS:
            try:
                _read(new, found, name)
            except GatewayError as error:
                if not (isinstance(error, _LASTING) or name.endswith(_NEXT)):
                    raise
                if error.detail not in new.errors.values():  # once: also if others need this step
                    new.errors.setdefault(PART_OF[step], error.detail)
                if step == name:
                    new.states[PART_OF[step]] = {"state": "left_out", "why": error.detail}
    if found.truncated:
        new.errors["truncated"] = why = f"of objects, faces and lines, only {MAX_CROPS} were described"
        new.states["truncated"] = {"state": "left_out", "why": why}
    if "image" in found.steps:
        if not new.vectors:
            found.require("image")
            raise WrongTask(new.errors["embedding"])
        new.norm = next((result.norm for result in found.steps["image"].results if isinstance(result, Embedding)), None)


def _read(new: NewImage, found: CascadeAnswer, name: str) -> None:
    step, results = name.removesuffix(_NEXT), found.require(name).results
    field, read = _READERS[step]
    setattr(new, field, read(found))
    state = {"state": "there" if getattr(new, field) else "none"}
    if results:
        state["model"] = refer_to(results[0].spec.name, results[0].version)
    new.states.setdefault(PART_OF[step], state)


def _add_thumbnails(new: NewImage, decoded: Patch) -> None:
    new.thumbnail = to_thumbnail(decoded.image, _IMAGE_SIDE)
    for face in new.faces:
        face.thumbnail = to_thumbnail(decoded.image, _FACE_SIDE, face.box)
