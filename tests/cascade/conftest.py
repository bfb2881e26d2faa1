"""What runs cascades in a real Triton with the small models."""

from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import msgspec
import pytest

from app.cascade.definition import Cascade
from app.cascade.run import CascadeAnswer, run_cascade
from app.embedded.server import EmbeddedTriton
from app.main import open_resources
from app.pipeline.call import CallContext
from app.pipeline.pipeline import Pipeline
from app.resilience.deadline import Deadline
from app.settings.schema import Settings
from app.telemetry.metrics import Metrics
from app.telemetry.timing import Timing
from tests.support import SCENE, eventually


class Runner(NamedTuple):
    """Runs cascades in one worker."""

    pipeline: Pipeline
    metrics: Metrics

    async def run(self, steps: dict[str, Any], image: bytes = SCENE, name: str = "", **context: Any) -> CascadeAnswer:  # noqa: ANN401
        """Run a cascade of these steps, as a file has them."""
        cascade = msgspec.convert({"steps": steps, "name": name}, Cascade)
        call = CallContext(Deadline.after(context.pop("seconds", 30)), context.pop("timing", None) or Timing(), "abc", **context)
        return await run_cascade(self.pipeline, cascade, image, call, self.metrics)


@pytest.fixture
async def worker(settings: Settings, triton: EmbeddedTriton) -> AsyncIterator[Runner]:
    assert triton.poll() is None
    async with open_resources(msgspec.structs.replace(settings, model="six_columns")) as (_, pipeline, metrics):
        yield Runner(pipeline, metrics)
        await eventually(lambda: not pipeline.admission.memory.used_bytes)  # of what was left under way
        assert not any(queue.in_progress for queue in pipeline.admission.queues.values())
