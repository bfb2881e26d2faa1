"""Gauges of a worker: queues, calls, memory and slots in use."""

from collections.abc import Mapping

from app.host import memory
from app.pipeline.batcher import Batcher
from app.pipeline.decode_threads import DecodeThreads
from app.resilience import last_valid
from app.resilience.admission import Admission
from app.telemetry.metrics import Metrics
from app.triton.pool import TritonPool


def sample(
    metrics: Metrics,
    admission: Admission,
    pool: TritonPool,
    decode_threads: DecodeThreads,
    batchers: Mapping[str, Batcher],
) -> None:
    """Set the gauges of this worker."""
    metrics.workers.set(1)
    for file in last_valid.FILES:
        metrics.refused_files.set(int(file in last_valid.refused), file)
    for model, queue in admission.queues.items():
        metrics.model_active.set(queue.own, model)
        metrics.model_waiting.set(queue.waiting + len(queue.frames), model)
        metrics.model_limit.set(int(queue.limit), model)
    for model, images in admission.waiting_batch_images().items():
        metrics.model_waiting_batch_images.set(images, model)
    for model, batcher in batchers.items():
        metrics.waiting_images.set(len(batcher.waiting), model)
        metrics.calls.set(batcher.calls, model)
        metrics.circuit_open.set(int(not pool.is_usable(model)), model)
    servers = [*pool.leaving, *pool.servers]  # a leaving and a new Triton may have the same name
    for server in servers:
        triton = metrics.table.alias(server.address)
        metrics.triton_images.add(server.take_new_images(), triton)
        metrics.triton_calls.set(sum(served.calls for served in server.models.values()), triton)
        for model, served in server.models.items():
            metrics.triton_left_out.set(int(server in pool.servers and not served.is_usable), triton, model)
            metrics.triton_wrong.set(int(server in pool.servers and served.is_wrong), triton, model)
    for gauge in (metrics.triton_calls, metrics.triton_left_out, metrics.triton_wrong):
        gauge.clear_except({metrics.table.alias(server.address) for server in servers})
    metrics.table.keep_aliases({server.address for server in servers})
    slots, in_use = pool.transport.count_slots()
    metrics.slots.set(slots)
    metrics.slots_in_use.set(in_use)
    metrics.decode_queue.set(decode_threads.waiting)
    budgets = {
        "uploads": admission.upload_memory,
        "anonymous": admission.anonymous_uploads.memory,
        "images": admission.memory,
        "batches": admission.batch_memory,
    }
    for purpose, budget in budgets.items():
        metrics.reserved_bytes.set(budget.own_bytes, purpose)
        metrics.reserved_limit.set(budget.limit_bytes, purpose)
    metrics.worker_memory.set(memory.resident_bytes())
