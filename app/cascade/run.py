"""Run a cascade on an image: decode it once, ask the models of the steps, and collect what they answer."""

from collections.abc import Sequence
from typing import NamedTuple

from app.cascade.definition import Cascade
from app.errors import GatewayError
from app.pipeline.call import CallContext
from app.pipeline.pipeline import Pipeline
from app.pipeline.results import StepResult
from app.telemetry.metrics import Metrics


class StepAnswer(NamedTuple):
    """What a step has answered."""

    results: Sequence[StepResult] = ()
    """Of a step about the whole image the only one; of others one for each crop."""
    objects: Sequence[int] = ()
    """For each result the index of its object among those of the step `of`; empty for a step about the whole image."""
    error: GatewayError | None = None
    """Why there are no results, or not all: of this step, or of one that it needs."""


class CascadeAnswer(NamedTuple):
    """What a cascade has answered about an image."""

    width: int
    height: int
    """Size of the upright image, pixels."""
    steps: dict[str, StepAnswer]
    """By name, in the order of the definition."""
    truncated: bool
    """Whether there were more objects than could be cropped."""

    def require(self, name: str) -> StepAnswer:
        """Return the answer of a step; raise its error if it has one."""
        answer = self.steps[name]
        if answer.error is not None:
            raise answer.error
        return answer


async def run_cascade(pipeline: Pipeline, cascade: Cascade, image: bytes, call: CallContext, metrics: Metrics) -> CascadeAnswer:
    """Ask the models of a cascade about an encoded image.

    A step that fails does not keep others from answering, unless they need it.

    Raises:
        GatewayError: The image is rejected, or all steps about the whole image have failed.
    """
    raise NotImplementedError
