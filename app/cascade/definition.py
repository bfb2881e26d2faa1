"""Definitions of cascades: the steps, each a model and what it is asked about."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from app.model.reference import NAME

MAX_CROPS = 300
"""Maximum number of crops of all steps of a request together."""
_Name = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,31}\Z")]
_Reference = Annotated[str, Meta(pattern=rf"^{NAME.pattern}(:[1-9][0-9]{{0,17}})?\Z")]
_Fraction = Annotated[float, Meta(ge=0, le=1)]


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A model, and what it is asked about. Its task is that of the model."""

    model: _Reference
    of: str | None = None
    """The step whose objects are cropped; None for the whole image."""
    crop: Literal["box", "corners", "landmarks"] = "box"
    """`box`: the box of each object; `corners`: what lies between its corners, as of a line of text or an
    oriented box, straightened;
    `landmarks`: the object, turned and scaled so that its keypoints lie where the model wants them."""
    margin: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """By how much of its sides a box is enlarged, on each side."""
    classes: tuple[str, ...] = ()
    """Names of the classes of the objects that are cropped; all if empty."""
    max_crops: Annotated[int, Meta(ge=1, le=MAX_CROPS)] = MAX_CROPS
    order: Literal["score", "size"] = "score"
    """Which objects are cropped if there are more: those with the highest scores, or those with the largest boxes."""
    turned_by: str | None = None
    """A step of the same objects that classifies them as `0` or `180`: those that are certainly `180` are turned."""
    confidence: _Fraction | None = None
    """Minimum score of what the model finds; None for the default of its task."""
    top_k: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Maximum number of classes of a classifier."""


class Cascade(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Steps by name. Those that do not need each other run side by side."""

    title: str = ""
    name: str = ""
    """In metrics; that of the table in the file."""
    steps: Annotated[dict[_Name, Step], Meta(min_length=1, max_length=16)]

    def __post_init__(self) -> None:
        known: dict[str, Step] = {}
        for name, step in self.steps.items():
            if step.of is not None and step.of not in known:
                raise ValueError(f"steps.{name}.of: there is no step {step.of} above it")
            turning = known.get(step.turned_by or "")
            if step.turned_by is not None and (turning is None or step.of is None or turning.of != step.of):
                raise ValueError(f"steps.{name}.turned_by: there is no step {step.turned_by} above it, of the same objects")
            known[name] = step

    @property
    def model(self) -> str:
        """Reference of the model of the first step."""
        return next(iter(self.steps.values())).model

    @property
    def description(self) -> str:
        """Each step, its model and what it is about."""
        return ", ".join(f"{name} ({step.model}{f' of {step.of}' if step.of else ''})" for name, step in self.steps.items())

    def without(self, *names: str) -> "Cascade":
        """Return the cascade without these steps and those that need them; at least one must remain."""
        steps: dict[str, Step] = {}
        for name, step in self.steps.items():
            if name not in names and {step.of, step.turned_by} - {None} <= steps.keys():
                steps[name] = step
        return msgspec.structs.replace(self, steps=steps)

    def vary(self, **changes: dict[str, object]) -> "Cascade":
        """Return the cascade with other values of these steps, by their names."""
        steps = {name: msgspec.structs.replace(step, **changes.get(name, {})) for name, step in self.steps.items()}
        return msgspec.structs.replace(self, steps=steps)
