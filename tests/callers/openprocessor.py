"""What OpenProcessor's scripts read in its answers: all these keys, with values of these types."""

from collections.abc import Callable
from typing import Any

import httpx

Shape = Any
"""A type, a test of a value, a list of one shape, or a dict of shapes by key."""
Keys = dict[str, Shape]
PREFIXES = ("", "/v1")


def share(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1


def several_of(count: int, shape: Shape) -> Callable[[Any], bool]:
    return lambda value: len(value) == count and fits(value, [shape])


def optional(shape: Shape) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value, shape)


def vector(value: Any) -> bool:  # noqa: ANN401 - any JSON
    return len(value) > 1 and fits(value, [float])


def anything(value: object) -> bool:
    return value is None or value is not None


def of(shape: Shape, names: str) -> Keys:
    """Return keys that have values of the same shape."""
    return dict.fromkeys(names.split(), shape)


def fits(value: Any, shape: Shape) -> bool:  # noqa: ANN401 - any JSON
    if isinstance(shape, dict):
        return all(key in value and fits(value[key], member) for key, member in shape.items())
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(member, shape[0]) for member in value)
    if isinstance(shape, type):
        return isinstance(value, (int, float) if shape is float else shape)
    return bool(shape(value))


ANSWER: Keys = {"total_time_ms": float, "request_id": str}
SIZE = of(int, "width height")
BOX = several_of(4, share)
BATCH = of(int, "total_images processed_images failed_images") | {
    "failures": [of(str, "filename error") | of(int, "index")],
    "status": str,
}
OF_BATCH = of(str, "filename status") | of(int, "image_index")
DETECTION = of(share, "x1 y1 x2 y2 confidence") | {"class": int, "class_name": str}
DETECTED: Keys = {"detections": [DETECTION], "num_detections": int, "status": str, "image": SIZE}
DETECTIONS = ANSWER | DETECTED | {"model": {"name": str}}
MANY_DETECTIONS = BATCH | {"total_time_ms": float, "results": [DETECTED | OF_BATCH]}
MODEL = of(str, "name status") | of(optional(int), "max_batch_size num_classes") | of(optional(str), "backend")
MODEL |= {"versions": [str], "has_labels": bool, "input_shape": optional([int])}
MODELS = {"models": [MODEL], "total": int, "triton_status": str}

FACE: Keys = {"box": BOX, "landmarks": several_of(10, share), "score": share, "quality": share}
FACES = ANSWER | {"num_faces": int, "faces": [FACE], "image": SIZE}
RECOGNIZED = FACES | {"embeddings": [vector]}
VERIFIED = ANSWER | of(of(int, "num_faces face_used"), "image1 image2") | of(share, "similarity threshold") | {"match": bool}
EMBEDDED = ANSWER | {"embedding": vector, "embedding_norm": float, "indexed": bool, "image_id": optional(str), "status": str}
OF_EMBEDDED = of(optional(str), "filename error") | of(optional(vector), "embedding") | of(optional(float), "embedding_norm")
OF_EMBEDDED |= {"index": int, "status": str}
MANY_EMBEDDED = ANSWER | of(int, "total successful failed") | {"results": [OF_EMBEDDED], "status": str}
EMBEDDED_BOXES = ANSWER | {"boxes": [{"box": BOX, "embedding": vector}], "num_boxes": int, "status": str}
TEXTS: Keys = {"texts": [str], "full_text": str, "num_texts": int}
REGION: Keys = {"text": str, "box": several_of(8, float), "box_normalized": BOX} | of(share, "det_score rec_score")
READ = ANSWER | TEXTS | {"status": str, "regions": [REGION], "image": SIZE, "error": optional(str)}
OF_READ = OF_BATCH | TEXTS | {"error": optional(str), "image": SIZE}
MANY_READ = ANSWER | BATCH | of(int, "total_text_regions images_with_text") | {"results": [OF_READ]}
ANALYZED_TEXT = TEXTS | {"boxes": [several_of(8, float)], "boxes_normalized": [BOX]} | of([share], "det_scores rec_scores")
OBJECT: Keys = {"box": BOX, "confidence": share, "class_id": int, "class_name": str, "embedding": optional(vector)}
ANALYZED = ANSWER | of(int, "num_detections num_faces") | of(optional(vector), "global_embedding")
ANALYZED |= {"detections": [OBJECT], "faces": [FACE | of(optional(vector), "embedding")], "timing": dict, "image": SIZE}
ANALYZED |= {"status": str, "embedding_norm": optional(float), "ocr": optional(ANALYZED_TEXT)}
OF_ANALYZED = OF_BATCH | of(int, "num_detections num_faces") | {"error": optional(str), "image": SIZE, "has_text": bool}
MANY_ANALYZED = ANSWER | BATCH | of(int, "total_detections total_faces images_with_text") | {"results": [OF_ANALYZED]}

INGESTED = ANSWER | of(str, "status image_id imohash") | of(int, "num_detections num_faces")
INGESTED |= of(optional(str), "existing_image_id existing_image_path message error")
INGESTED |= {"embedding_norm": optional(float), "indexed": optional(of(int, "global vehicles people faces"))}
INGESTED |= {"near_duplicate": optional(of(anything, "action group_id similarity matched_image")), "errors": optional(list)}
INGESTED |= {"ocr": optional({"num_texts": int, "full_text": str, "indexed": bool})}
MANY_INGESTED = ANSWER | of(int, "total processed duplicates errors_count near_duplicates") | {"status": str}
MANY_INGESTED |= of(anything, "deferred_ops duplicate_details error_details near_duplicate_details")
MANY_INGESTED |= {"indexed": of(int, "global vehicles people faces ocr")}
FOLDER = of(str, "status directory") | of(int, "total_files processed duplicates") | of(anything, "skipped_extensions")
HIT: Keys = {"image_id": str, "image_path": optional(str), "score": share, "metadata": dict}
FACE_HIT = HIT | of(optional(str), "person_id person_name") | {"face_id": str, "box": BOX, "confidence": share}
OBJECT_HIT = HIT | {"box": optional(BOX), "class_id": optional(int), "category": str}
TEXT_HIT = HIT | of(optional(str), "matched_text full_text") | {"text_box": optional(BOX)}
FOUND = ANSWER | {"total_results": int, "search_time_ms": float}
SEARCHED = FOUND | {"status": str, "query_type": str, "results": [HIT]}
OBJECTS_SEARCHED = SEARCHED | {"query_object": {"box": BOX, "class_id": int, "category": str}, "results": [OBJECT_HIT]}
FACES_FOUND = FOUND | {"query_face": FACE, "results": [FACE_HIT]}
FACES_SEARCHED = SEARCHED | FACES_FOUND
TEXTS_SEARCHED = SEARCHED | {"query_text": str, "results": [TEXT_HIT]}
IDENTIFIED = {"query_face": FACE, "identified": bool, "best_match": optional(FACE_HIT), "all_matches": [FACE_HIT]}
FACES_IDENTIFIED = ANSWER | {"num_faces": int, "results": [IDENTIFIED]}
OCR_HIT = {"image_id": str, "image_path": optional(str), "score": share, "full_text": str, "num_texts": int, "highlight": anything}
OCR_SEARCHED = ANSWER | of(str, "status query") | of(int, "total_results page size") | {"results": [OCR_HIT]}
STATISTICS = {"status": str, "indexes": [of(str, "name size_human") | of(int, "doc_count size_bytes") | {"exists": bool}]}
KEPT = of(str, "status image_id") | {"image_path": optional(str), "metadata": dict, "indexed_in": anything, "num_detections": int}
GROUPS = {"groups": [of(str, "group_id primary_image_id") | {"primary_image_path": optional(str), "member_count": int}]}


def read(response: httpx.Response, shape: Keys) -> Any:  # noqa: ANN401 - of this shape
    """Decode an answer, in which all that the shape names must be."""
    assert response.is_success, response.text
    answer = response.json()
    assert fits(answer, shape), answer
    assert answer.get("request_id", response.headers["x-request-id"]) == response.headers["x-request-id"]
    return answer


def assert_refused(response: httpx.Response, status: int) -> str:
    """Check an error: `detail` is a sentence, which is returned."""
    detail = response.json()["detail"]
    assert (response.status_code, type(detail)) == (status, str), response.url
    return str(detail)


def one(image: bytes, name: str = "image") -> dict[str, tuple[str, bytes, str]]:
    """Return the part of a form with an image."""
    return {name: ("photo.jpg", image, "image/jpeg")}


def several(*images: bytes) -> list[tuple[str, tuple[str, bytes, str]]]:
    """Return the parts of a form with images."""
    return [("images", (f"{number}.jpg", image, "image/jpeg")) for number, image in enumerate(images)]
