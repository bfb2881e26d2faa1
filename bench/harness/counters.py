"""Triton's statistics of one model."""

from collections import Counter
from typing import NamedTuple

import grpc
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from app.triton.client import OPTIONS
from bench.report.measurements import TritonUse

_SECONDS = 5


class CountersError(Exception):
    """Triton's statistics cannot be read; the message is one line."""


class Counters(NamedTuple):
    """Statistics of a model since it was loaded. Times are in nanoseconds, summed over requests."""

    inferences: int
    executions: int
    successes: int
    """Successful requests."""
    compute_ns: int
    queue_ns: int
    batches: Counter[str]
    """Executions by batch size."""

    def since(self, before: "Counters") -> TritonUse:
        """Return the statistics since `before`."""
        successes = self.successes - before.successes
        return TritonUse(
            inferences=self.inferences - before.inferences,
            executions=self.executions - before.executions,
            queue_ms=(self.queue_ns - before.queue_ns) / successes / 1e6 if successes else 0.0,
            compute_ms=(self.compute_ns - before.compute_ns) / successes / 1e6 if successes else 0.0,
            batches=dict(self.batches - before.batches),
        )


def read_counters(triton: str, model: str) -> Counters:
    """Read the statistics of a model, summed over its versions, from a Triton's gRPC endpoint.

    Raises:
        CountersError: Triton does not respond, or does not have the model.
    """
    request = service_pb2.ModelStatisticsRequest(name=model)
    try:
        with grpc.insecure_channel(triton, options=OPTIONS) as channel:
            versions = GRPCInferenceServiceStub(channel).ModelStatistics(request, timeout=_SECONDS).model_stats
    except grpc.RpcError as error:
        reason = (error.details() or "").partition("\n")[0]
        raise CountersError(f"Triton at {triton}: {error.code().name} {reason}") from error
    *numbers, batches = zip(*map(_counters_of, versions), strict=True)
    return Counters._make([*map(sum, numbers), sum(batches, Counter[str]())])


def _counters_of(version: service_pb2.ModelStatistics) -> Counters:
    times = version.inference_stats
    return Counters(
        inferences=version.inference_count,
        executions=version.execution_count,
        successes=times.success.count,
        compute_ns=times.compute_input.ns + times.compute_infer.ns + times.compute_output.ns,
        queue_ns=times.queue.ns,
        batches=Counter({str(batch.batch_size): batch.compute_infer.count for batch in version.batch_stats}),
    )
