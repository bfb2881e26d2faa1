"""What Triton's models have done since they were loaded, from its own counters."""

from operator import add
from typing import NamedTuple

from tritonclient.grpc import service_pb2

from app.triton.client import TritonClient


class ModelStatistics(NamedTuple):
    """The counters of one model, all its versions together. Times are sums over requests.

    A request may hold several images, and an execution several requests.
    """

    inferences: int = 0
    """Images that were processed."""
    executions: int = 0
    """Batches in which they were."""
    queue_count: int = 0
    """Requests that have left the queue."""
    queue_ns: int = 0
    compute_infer_count: int = 0
    """Requests that were executed."""
    compute_infer_ns: int = 0
    """The time of each batch counts once for each of its requests."""

    @property
    def batch_size(self) -> float:
        """Images per execution on average; 0 without any."""
        return self.inferences / self.executions if self.executions else 0.0

    @property
    def queue_ms(self) -> float:
        """Time that a request has waited in the queue on average, milliseconds; 0 without any."""
        return self.queue_ns / self.queue_count / 1e6 if self.queue_count else 0.0

    @property
    def inference_ms(self) -> float:
        """Time that a request's batch took on average, milliseconds; 0 without any."""
        return self.compute_infer_ns / self.compute_infer_count / 1e6 if self.compute_infer_count else 0.0

    def plus(self, other: "ModelStatistics") -> "ModelStatistics":
        """Return the counters of both."""
        return ModelStatistics(*map(add, self, other))

    def since(self, before: "ModelStatistics") -> "ModelStatistics":
        """Return what the model has done after `before`; all that it has done if it was loaded again in between."""
        differences = ModelStatistics(*(now - then for now, then in zip(self, before, strict=True)))
        return self if min(differences) < 0 else differences


async def read_statistics(client: TritonClient, seconds: float) -> dict[str, ModelStatistics]:
    """Ask Triton for the counters of every model it has loaded, by model.

    Args:
        client: Of that Triton.
        seconds: How long it may take.

    Raises:
        TritonUnavailable: Triton does not answer in time.
        GatewayError: Triton does not tell.
    """
    answer = await client.ask("ModelStatistics", service_pb2.ModelStatisticsRequest(), seconds)
    models: dict[str, ModelStatistics] = {}
    for version in answer.model_stats:
        stats = version.inference_stats
        counters = ModelStatistics(
            version.inference_count,
            version.execution_count,
            stats.queue.count,
            stats.queue.ns,
            stats.compute_infer.count,
            stats.compute_infer.ns,
        )
        models[version.name] = models.get(version.name, ModelStatistics()).plus(counters)
    return models
