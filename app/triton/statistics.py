"""Triton's statistics of its models since they were loaded."""

from operator import add
from typing import NamedTuple

from app.triton.client import TritonClient


class ModelStatistics(NamedTuple):
    """Counters of a version of a model; times are sums over requests, each of which may contain several images."""

    inferences: int = 0
    """Processed images."""
    executions: int = 0
    """Processed batches."""
    queue_count: int = 0
    """Requests that have left the queue."""
    queue_ns: int = 0
    compute_infer_count: int = 0
    """Executed requests."""
    compute_infer_ns: int = 0
    """The time of each batch counts once for each of its requests."""

    @property
    def batch_size(self) -> float:
        """Mean number of images per execution; 0 without executions."""
        return self.inferences / self.executions if self.executions else 0.0

    @property
    def queue_ms(self) -> float:
        """Mean time of a request in the queue, in milliseconds; 0 without requests."""
        return self.queue_ns / self.queue_count / 1e6 if self.queue_count else 0.0

    @property
    def inference_ms(self) -> float:
        """Mean time of a request's batch in the model, in milliseconds; 0 without requests."""
        return self.compute_infer_ns / self.compute_infer_count / 1e6 if self.compute_infer_count else 0.0

    def plus(self, other: "ModelStatistics") -> "ModelStatistics":
        """Return the sum of both."""
        return ModelStatistics(*map(add, self, other))

    def since(self, before: "ModelStatistics") -> "ModelStatistics":
        """Return the difference from earlier counters; all counters if the model was loaded again in between."""
        differences = ModelStatistics(*(now - then for now, then in zip(self, before, strict=True)))
        return self if min(differences) < 0 else differences


async def read_statistics(client: TritonClient, seconds: float) -> dict[tuple[str, str], ModelStatistics]:
    """Return the counters of each loaded model, by name and version."""
    answer = await client.ask("ModelStatistics", seconds)
    return {
        (model.name, model.version): ModelStatistics(
            model.inference_count,
            model.execution_count,
            model.inference_stats.queue.count,
            model.inference_stats.queue.ns,
            model.inference_stats.compute_infer.count,
            model.inference_stats.compute_infer.ns,
        )
        for model in answer.model_stats
    }
