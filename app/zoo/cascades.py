"""The cascades of a model repository: check one against its models, add it and remove it."""

import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from app.cascade import catalog
from app.cascade.definition import Cascade, Step
from app.expected import suggestion
from app.host import toml
from app.host.program import CommandError
from app.model.heads import DetectionHead, ObbHead, PoseHead, TextDetectionHead
from app.model.spec import ModelSpec
from app.telemetry.logging import say
from app.zoo.repository import Repository, require_name, sync

_HEADER = "# Cascades of Nereid. `nereid add` and `nereid remove` write this file anew, without comments.\n"
RESERVED = re.compile(
    "x1|y1|x2|y2|bbox|confidence|class|class_id|class_name|mask|mask_offset|keypoints|rotation|corners|detections|num_detections|"
    "status|image|model|total_time_ms|request_id|visualization|truncated|errors"
)
"""Names that steps of a user's cascade may not have, because the answer has these fields."""


def add(source: Path, name: str | None, repository: Repository, find_spec: Callable[[str], ModelSpec | None]) -> None:
    """Add the cascade in a file, or replace that of its name; raise CommandError if it is not valid, or does not fit its models."""
    # `find_spec` returns the spec of a model by its reference, None if there is none.
    name, cascade = require_name(name or source.stem), catalog.read_one(source)
    if name in catalog.BUILT_IN:
        raise CommandError(f"{name} is a cascade of the program; choose another --name, or edit {repository.path / catalog.FILE}")
    if find_spec(name) is not None:
        raise CommandError(f"{name} is a model; choose another --name")
    specs: dict[str, ModelSpec] = {}
    for title, step in cascade.steps.items():
        if (spec := find_spec(step.model)) is None:
            raise CommandError(
                f"{source}: [steps.{title}] model: neither {repository.path} nor a Triton elsewhere has {step.model}"
            )
        specs[title] = spec
        if fault := _find_fault(title, step, specs):
            raise CommandError(f"{source}: [steps.{title}] {fault}")
    put(name, cascade, repository)
    say(f"POST /predict/{name} asks {cascade.description}")


def put(name: str, cascade: Cascade | None, repository: Repository) -> bool:
    """Add or replace a cascade, or remove it if it is None; return whether it was there. Raise CommandError if that fails."""
    path = repository.path / catalog.FILE
    with repository.writing() as scratch:
        cascades = catalog.read(path)
        is_there = cascades.pop(name, None) is not None
        new = [*cascades.items(), *([] if cascade is None else [(name, cascade)])]
        if is_there or cascade is not None:
            unfinished, tables = scratch / catalog.FILE, {each: msgspec.structs.replace(one, name="") for each, one in new}
            unfinished.write_text(_HEADER + toml.dump(msgspec.to_builtins(tables)), encoding="utf-8")
            sync(unfinished)
            unfinished.replace(path)
    return is_there


def _find_fault(name: str, step: Step, specs: dict[str, ModelSpec]) -> str:
    own, source = specs[name], specs[step.of or next(iter(specs))]
    if RESERVED.fullmatch(name):
        return "the answer has a field of this name; choose another one"
    if not isinstance(source.head, DetectionHead | TextDetectionHead):
        return f"{'of' if step.of else 'model'}: {source.name} is a {source.head.noun}, which finds no objects"
    if step.crop == "corners" and not isinstance(source.head, ObbHead | TextDetectionHead):
        return f"crop: {source.name} is a {source.head.noun}, whose objects have no corners; expected box"
    landmarks = len(source.head.keypoint_names) if isinstance(source.head, PoseHead) else 0
    if step.crop == "landmarks" and not len(own.landmarks) == 2 * landmarks > 0:
        wanted = f"wants {len(own.landmarks) // 2} landmarks" if own.landmarks else "has no `landmarks` in its config"
        return f"crop: {own.name} {wanted}, and {source.name} finds {landmarks or 'none'} of each object"
    unknown = next((wanted for wanted in step.classes if wanted not in source.labels), None)
    return "" if unknown is None else f"classes: {source.name} has no class {unknown}{suggestion(unknown, source.labels)}"
