"""POST /search/..., /faces/search, /faces/identify and /ocr/search: images like one, or with these words."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, TypeVar

from litestar.handlers import HTTPRouteHandler
from msgspec import UNSET, Meta, UnsetType

from app.api.answering.schema import Timed
from app.api.parameters.parse import Fraction, split_classes
from app.api.parameters.tasks import Url
from app.api.search.asking import ROUNDING, Asked, FilterParameters, Fuzzy, Size, Text, TopParameters, search_route, words_of
from app.api.sight.embed import ask_text
from app.api.sight.faces import Face, require_faces
from app.embedding.outputs import cosine_at, similarity_at
from app.errors import InvalidParameter, NoFace, UnknownModel, UnsupportedModel
from app.expected import suggestion
from app.search.describe import INDEX_OF
from app.search.engine import FacePart, Hit, Page, Part, Vector

_CLASSES = {str(index): name for index, name in enumerate(INDEX_OF)}
_CATEGORIES = {"vehicles": "vehicle", "people": "person"}
# So many of each list are joined, or more if a later page is wanted.
_FUSED, _MAX_FUSED = 100, 1000
# Of reciprocal rank fusion. Source: Cormack, Clarke and Buettcher, SIGIR 2009.
_K = 60
Document = dict[str, Any]
S = TypeVar("S", bound=Part)
_Nth = Annotated[int, Meta(ge=0, le=999, description="Which one in the image is searched for: from 0, by descending score.")]
_Confidence = Annotated[Fraction, Meta(description="Minimum score of a face in the image.")]
_Classes = Annotated[str | list[str] | None, Meta(description="Only these: names, or ids of COCO, separated by commas.")]
_Similarity = Annotated[Fraction, Meta(description="Minimum similarity, as for /faces/verify.")]


class _ImageParameters(TopParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    url: Url = None


class _ObjectParameters(_ImageParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    repeatable = frozenset({"class_filter"})
    box_index: _Nth = 0
    class_filter: _Classes = None


class _FaceParameters(_ImageParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    face_index: _Nth = 0
    confidence: _Confidence = 0.5
    min_score: _Similarity = 0.7


class _IdentifyParameters(FilterParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    url: Url = None
    top_k: Size = 5
    confidence: _Confidence = 0.5
    threshold: _Similarity = 0.6


class _SentenceParameters(TopParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    text: Text = None
    fuzzy: Fuzzy = True
    min_score: Annotated[Fraction, Meta(description="Minimum cosine; those of texts are lower than those of images.")] = 0.2
    use_cache: Annotated[bool, Meta(description="Not used; other gateways cache vectors of texts.")] = True


class _LinesParameters(_SentenceParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    min_score: Annotated[Fraction, Meta(description="Minimum score of a result: how well the words match.")] = 0.0


class _WordsParameters(FilterParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    text: Text = None
    fuzzy: Fuzzy = True
    size: Size = 20


class _HybridParameters(_SentenceParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    url: Url = None
    min_score: Annotated[Fraction, Meta(description="Minimum cosine.")] = 0.0


class SearchAnswer(Timed, frozen=True, kw_only=True):
    """What was found, best first."""

    status: Literal["success"] = "success"
    query_type: str
    results: Sequence[Document]
    """Each has `image_id`, `image_path`, `score` and `metadata`; an object or a face also `box` and `confidence`, with `class_id`,
    `class_name` and `category`, or `face_id` and `person_name`, under which the face was registered; text `matched_text`,
    `text_box`, `highlight`, `full_text` and `num_texts`; of a hybrid search `ranks`, its places in the lists `image`, `text` and
    `words`.

    For /faces/identify, there is one for each face: `query_face`, `identified`, `best_match` (the registered face whose
    name it gets, or else the nearest face without a name) and `all_matches`. The score is the cosine of vectors, the similarity of
    faces, how well words match, or a sum over ranks.
    """
    total_results: int
    num_faces: int | UnsetType = UNSET
    query_face: Face | UnsetType = UNSET
    query_object: Document | UnsetType = UNSET
    """`box`, `class_id`, `class_name` and `category`."""
    query_text: str | UnsetType = UNSET
    query: str | UnsetType = UNSET
    page: int | UnsetType = UNSET
    size: int | UnsetType = UNSET
    search_time_ms: float


def _result(hit: Hit, score: float | None = None) -> Document:
    shown = round(max(hit.score if score is None else score, 0.0), 6)
    return {"image_id": hit.image_id, "image_path": hit.path, "score": shown, "metadata": hit.metadata}


def _part(hit: Hit, score: float | None = None) -> Document:
    return _result(hit, score) | {"box": hit.box, "confidence": hit.part_score}


def _face(hit: Hit, match_distance: float) -> Document:
    whose = {"face_id": hit.part_id, "person_id": None, "person_name": hit.name}  # OpenProcessor's clients expect an id of persons
    return _part(hit, similarity_at(hit.score, match_distance)) | whose


def _text(hit: Hit, score: float | None = None) -> Document:
    own: Document = {"matched_text": None, "text_box": None, "highlight": []}
    if hit.line is not None:
        text, across, down = hit.line.text, hit.line.corners[::2], hit.line.corners[1::2]
        own = {"matched_text": text, "text_box": [min(across), min(down), max(across), max(down)], "highlight": [text]}
    return _result(hit, score) | own | {"full_text": hit.full_text, "num_texts": hit.num_lines}


def _query(face: FacePart) -> Face:
    return Face(list(face.box), list(face.landmarks), face.score, face.quality)


def _nth(parts: Sequence[S], index: int, name: str, what: str) -> tuple[S, Vector]:
    if index >= len(parts) or not parts[index].vectors:
        raise InvalidParameter(f"{name}: there is no number {index}; the image has {len(parts)} {what}, which are counted from 0")
    return parts[index], parts[index].vectors[0]


def _fields(kind: str, results: Iterable[Document], **others: Any) -> Document:  # noqa: ANN401 - of an answer
    return {"query_type": kind, "results": (found := list(results)), "total_results": len(found), **others}


async def _by_image(asked: Asked[_ImageParameters]) -> Document:
    vector = await asked.search.image_vector(asked.image, asked.call)
    (hits,) = await asked.nearest("global", vector, least=asked.wanted.min_score)
    return _fields("image", map(_result, hits))


async def _describe(asked: Asked[Any]) -> Vector:
    text = await ask_text(asked.search.pipeline, words_of(asked.wanted.text).encode(), asked.call)
    return await asked.search.among_images(text, asked.call)


async def _by_text(asked: Asked[_SentenceParameters]) -> Document:
    (hits,) = await asked.nearest("global", await _describe(asked), least=asked.wanted.min_score)
    return _fields("text", map(_result, hits), query_text=words_of(asked.wanted.text))


async def _by_object(asked: Asked[_ObjectParameters]) -> Document:
    wanted = asked.wanted
    chosen, vector = _nth(await asked.search.objects(asked.image, asked.call), wanted.box_index, "box_index", "vehicles and people")
    classes = [_CLASSES.get(name, name) for name in split_classes(wanted.class_filter) or ()]
    for name in {*classes} - INDEX_OF.keys():
        raise InvalidParameter(f"class_filter: no object of the class {name!r} is searched{suggestion(name, INDEX_OF)}")
    (hits,) = await asked.nearest(chosen.index or "global", vector, least=wanted.min_score, classes=classes)
    category = _CATEGORIES.get(chosen.index or "", "other")
    query = {"box": chosen.box, "class_id": chosen.class_id, "class_name": chosen.class_name, "category": category}
    results = [_part(hit) | {"class_id": hit.class_id, "class_name": hit.class_name, "category": category} for hit in hits]
    return _fields("object", results, query_object=query)


async def _by_face(asked: Asked[_FaceParameters]) -> Document:
    wanted, faces = asked.wanted, await asked.search.faces(asked.image, asked.call, asked.wanted.confidence)
    if not faces:
        raise NoFace("no face was found; a lower `confidence` finds less certain ones")
    face, vector = _nth(faces, wanted.face_index, "face_index", "faces")
    distance = await asked.search.match_distance(asked.call)
    (hits,) = await asked.nearest("faces", vector, least=cosine_at(wanted.min_score, distance))
    return _fields("face", [_face(hit, distance) for hit in hits], query_face=_query(face))


async def _identify(asked: Asked[_IdentifyParameters]) -> Document:
    faces = [face for face in await asked.search.faces(asked.image, asked.call, asked.wanted.confidence) if face.vectors]
    distance = await asked.search.match_distance(asked.call)
    least = cosine_at(asked.wanted.threshold, distance)
    found = await asked.nearest("faces", *(face.vectors[0] for face in faces), least=least)
    named = await asked.search.find_names(asked.tenant, faces, least - ROUNDING, asked.call, asked.wanted.read_filter())
    results = []
    for face, hits, whose in zip(faces, found, named, strict=True):
        own = [hit for hit in hits if hit.name in {None, whose and whose.name}]  # no name but that of the face
        best = whose or next(iter(own), None)
        shown = {"best_match": best and _face(best, distance), "all_matches": [_face(hit, distance) for hit in own]}
        results.append({"query_face": _query(face), "identified": best is not None, **shown})
    return _fields("identify", results, num_faces=len(faces))


async def _by_words(asked: Asked[Any]) -> Document:
    wanted, words, where = asked.wanted, words_of(asked.wanted.text), asked.wanted.read_filter()
    options: Document = {"is_fuzzy": wanted.fuzzy, "where": where, "min_score": getattr(wanted, "min_score", 0.0) - ROUNDING}
    found = await asked.search.asking(asked.call).match_text(asked.tenant, words, wanted.window, **options)
    own = {"query_text": words, "query": words, "page": wanted.page, "size": wanted.window.size}
    return _fields("ocr", map(_text, found.items), **own) | {"total_results": found.total}


def _fuse(lists: Mapping[str, Sequence[Hit]]) -> list[tuple[Hit, float, dict[str, int]]]:
    """Join lists by reciprocal ranks: of each image the hit, of several one with text, the score, and its rank in each list."""
    hits: dict[str, Hit] = {}
    ranks: dict[str, dict[str, int]] = {}
    for name, found in lists.items():
        for rank, hit in enumerate(found, 1):
            ranks.setdefault(hit.image_id, {})[name] = rank
            if hit.image_id not in hits or hit.line is not None:
                hits[hit.image_id] = hit
    scores = {image: sum(1 / (_K + rank) for rank in own.values()) for image, own in ranks.items()}
    return [(hits[image], scores[image], ranks[image]) for image in sorted(scores, key=lambda image: (-scores[image], image))]


async def _hybrid(asked: Asked[_HybridParameters]) -> Document:
    wanted, tenant, where = asked.wanted, asked.tenant, asked.wanted.read_filter()
    size, offset = wanted.window
    if (end := offset + size) > _MAX_FUSED:
        raise InvalidParameter(f"page: at most {_MAX_FUSED} results are ranked")
    page, lists = Page(max(_FUSED, end)), dict[str, Sequence[Hit]]()
    vectors = {"image": await asked.search.image_vector(asked.image, asked.call)} if asked.image else {}
    words = words_of(wanted.text) if wanted.text is not None or not asked.image else None
    if words is not None:
        with suppress(UnknownModel, UnsupportedModel):  # then only the words count
            vectors["text"] = await _describe(asked)
    engine = asked.search.asking(asked.call)
    for name, vector in vectors.items():
        lists[name] = await engine.nearest(tenant, "global", vector, page, min_score=wanted.min_score - ROUNDING, where=where)
    if words is not None:
        lists["words"] = (await engine.match_text(tenant, words, page, is_fuzzy=wanted.fuzzy, where=where)).items
    results = [_text(hit, score) | {"ranks": ranks} for hit, score, ranks in _fuse(lists)[offset:end]]
    return _fields("hybrid", results, query_text=UNSET if words is None else words)


_ROUTES: Sequence[tuple[str, type[Any], Callable[[Asked[Any]], Any], str, Document]] = (
    ("/search/image", _ImageParameters, _by_image, "Find images like one", {"task": "embedding"}),
    ("/search/text", _SentenceParameters, _by_text, "Find images that a text describes", {"takes": "text"}),
    ("/search/object", _ObjectParameters, _by_object, "Find objects like one in an image", {"task": "detection"}),
    ("/search/face", _FaceParameters, _by_face, "Find faces like one in an image", {"check": require_faces}),
    ("/faces/search", _FaceParameters, _by_face, "Find faces like one in an image", {"check": require_faces}),
    ("/faces/identify", _IdentifyParameters, _identify, "Find out whose faces are in an image", {"check": require_faces}),
    ("/search/ocr", _LinesParameters, _by_words, "Find images by words in them", {"takes": "text"}),
    ("/ocr/search", _WordsParameters, _by_words, "Find images by words in them, by pages", {"takes": "text"}),
    ("/search/hybrid", _HybridParameters, _hybrid, "Find images by an image, a text, or both", {"task": "embedding"}),
)
ROUTES: list[HTTPRouteHandler] = [
    search_route(path, kind, SearchAnswer, find, summary=summary, **others) for path, kind, find, summary, others in _ROUTES
]
