"""The cascades that routes ask by name, with the default models of the settings; and the one that asks all of them at once."""

from typing import Protocol

import msgspec

from app.cascade.catalog import BUILT_IN, Catalog
from app.cascade.definition import Cascade, Step
from app.errors import UnsupportedModel
from app.model.heads import Task
from app.pipeline.pipeline import Pipeline

_DEFAULT_OF: dict[str, Task] = {"ocr_detection": "text_detection", "ocr_recognition": "text_recognition", "embedding": "embedding"}
"""For which task a model of the program's cascades is the default one, instead of which the settings may name another."""


PART_OF = {
    "objects": "detections",
    "image": "embedding",
    "object_embeddings": "embedding",
    "faces": "faces",
    "descriptions": "face_embeddings",
    "text": "ocr",
}
"""By step of `all_parts`, those before others that add to them: the part of an answer that is missing if the step fails."""


class Models(Protocol):
    """Models, and cascades of them."""

    catalog: Catalog
    pipeline: Pipeline


def named_cascade(models: Models, name: str, *steps: str) -> Cascade:
    """Return a cascade of the program, with the default models of the settings, or what has its name in the operator's file.

    Raises UnsupportedModel without these steps, the first about the whole image, the others about what that has found.
    """
    cascade = models.catalog.get(name)
    if cascade is not None and cascade is BUILT_IN.get(name):
        own: dict[str, dict[str, object]] = {}
        for step, one in cascade.steps.items():
            if (task := _DEFAULT_OF.get(one.model)) is not None:
                own[step] = {"model": models.pipeline.default_for(task)}
        cascade = cascade.vary(**own)
    missing = [step for step in steps if cascade is None or step not in cascade.steps]
    if cascade is None or missing:
        raise UnsupportedModel(f"the cascade {name} of the model repository has no step {missing[0]}, which this route needs")
    for step in steps:
        of = None if step == steps[0] else steps[0]
        if cascade.steps[step].of != of:
            whole = f"what {of} finds" if of else "the whole image"
            raise UnsupportedModel(f"the step {step} of the cascade {name} of the model repository is not about {whole}")
    return cascade


def all_parts(  # noqa: PLR0913 - the parts
    models: Models,
    objects: Step | None,
    *,
    has_vectors: bool,
    face_confidence: float | None,
    has_face_vectors: bool = True,
    has_text: bool,
) -> dict[str, Step]:
    """Put the steps of `embedding`, `faces` and `ocr` together, as far as they are wanted; errors are those of `named_cascade`.

    `objects` finds objects, which get vectors, too, as `object_embeddings`; None for none, as is the confidence for no faces.
    """
    steps = {} if objects is None else {"objects": objects}
    if has_vectors:
        steps["image"] = image = named_cascade(models, "embedding", "image").steps["image"]
        steps |= {} if objects is None else {"object_embeddings": msgspec.structs.replace(image, of="objects")}
    if face_confidence is not None:
        faces = named_cascade(models, "faces", "faces").vary(faces={"confidence": face_confidence})
        steps |= (faces if has_face_vectors else faces.without("descriptions")).steps
    return steps | (dict(named_cascade(models, "ocr", "lines", "text").steps) if has_text else {})
