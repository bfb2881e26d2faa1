"""The answer of a cascade: the detections of its first step, each with what the later steps say about it."""

from typing import Any

import msgspec

from app.api.answering import native
from app.api.answering.schema import BoxFormat
from app.cascade.definition import Cascade
from app.cascade.run import CascadeAnswer
from app.pipeline.results import Classifications, Detections, Embedding, StepResult, TextLine, TextRegions


def to_objects(cascade: Cascade, answer: CascadeAnswer) -> Detections:
    """Return what the first step has found, with titles of what later steps say; raise the error of the first step."""
    first, *later = cascade.steps
    (found,) = answer.require(first).results
    assert isinstance(found, Detections)  # noqa: S101 - `PathCascade` rejects others
    titles = [found.spec.class_name(class_id) for class_id in found.class_ids.tolist()]
    for name in later:
        if cascade.steps[name].of == first:
            for index, result in zip(answer.steps[name].objects, answer.steps[name].results, strict=True):
                titles[index] = f"{titles[index]} {_title(result)}".rstrip()
    return found._replace(titles=titles)


def _title(found: StepResult) -> str:
    if isinstance(found, Classifications):
        return " ".join(map(found.spec.class_name, found.class_ids[:1].tolist()))
    return found.text if isinstance(found, TextLine) else ""


def describe(found: StepResult, unit: BoxFormat) -> Any:  # noqa: ANN401 - any JSON
    """Describe the result of a step: a list of objects, text, a vector, or the best class, with all if there are several."""
    match found:
        case TextLine():
            return {"text": found.text, "confidence": round(found.score, 4)}
        case Embedding():
            return native.to_vector(found.vector)
        case Classifications():
            best, *_ = classes = msgspec.to_builtins(native.to_classifications(found)) or [None]
            return best | {"classifications": classes} if len(classes) > 1 else best
        case TextRegions():
            found = found.as_detections()
    return msgspec.to_builtins(native.to_detections(found, unit))


def add_steps(cascade: Cascade, answer: CascadeAnswer, unit: BoxFormat, content: dict[str, Any]) -> dict[str, Any]:
    """Add what later steps say to the objects in `content` that they are about, and what has failed as `errors`."""
    first, *later = cascade.steps
    objects, errors = {first: content["detections"]}, {}
    for name in later:
        own, of = answer.steps[name], cascade.steps[name].of
        described = [describe(result, unit) for result in own.results]
        objects[name] = [each for result in described if isinstance(result, list) for each in result]
        for index, result in zip(own.objects, described, strict=False):
            objects[str(of)][index][name] = result
        if own.error is not None:
            errors[name] = {"code": own.error.code, "detail": own.error.detail}
        elif of is None:
            content[name] = described[0]
    return {**content, "truncated": answer.truncated, **({"errors": errors} if errors else {})}
