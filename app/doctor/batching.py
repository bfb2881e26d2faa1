"""Checks of queue, batching and instances in a model's config."""

import math
from collections.abc import Iterator
from typing import Any

import msgspec

from app.doctor.finding import Finding, count, failure, ok, warning
from app.model.triton_config import ModelConfig, ParameterValue, QueuePolicy

# A batch is formed from the requests that queued while the instances were busy. The queue is limited.
_POLICY = """  default_queue_policy {
    timeout_action: REJECT
    default_timeout_microseconds: 600000000
    allow_timeout_override: true
    max_queue_size: 256
  }"""
_BATCHING = f"dynamic_batching {{\n  max_queue_delay_microseconds: 0\n{_POLICY}\n}}"

_HARMLESS_MS = 1.0
_USUAL_INFERENCE_MS = 10.0


def read(config: dict[str, Any]) -> ModelConfig:
    """Read a model's config in Triton's JSON form."""
    return msgspec.convert(config, ModelConfig, strict=False)


def check(model: ModelConfig, file: str) -> Iterator[Finding]:
    """Check batching and queue of a model; the fixes name the file of its config."""
    if model.ensemble_scheduling is not None or model.sequence_batching is not None:
        return  # an ensemble has no queue of its own; sequences do not apply to single images
    batching, largest = model.dynamic_batching, max(1, model.max_batch_size)
    too_large = [size for size in batching.preferred_batch_size if size > largest] if batching else []
    if too_large:
        sizes = ", ".join(map(str, too_large))
        text = f"{model.name} prefers batches of {sizes}, above its max_batch_size of {largest}: Triton does not load it"
        yield failure("preferred_batch_size", text, f"remove preferred_batch_size from {file}, or raise max_batch_size")
    if largest > 1 and batching is None:
        text = (
            f"{model.name} has no dynamic_batching: each image runs alone, though {largest} fit a batch, and the queue has no end"
        )
        yield warning("batching", text, f"add to {file}:\n{_BATCHING}")
        return
    if largest == 1 and any(group.kind == "KIND_GPU" for group in model.instance_group):
        text = f"{model.name} takes one image at a time, which leaves most of a GPU idle"
        yield warning("batching", text, f"export it with a variable batch dimension, and set in {file}: max_batch_size: 64")
    else:
        yield ok("batching", f"{model.name} takes up to {largest} images at a time")
    yield from _check_policy(model, file)


def _check_policy(model: ModelConfig, file: str) -> Iterator[Finding]:
    policy = model.dynamic_batching.default_queue_policy if model.dynamic_batching else QueuePolicy()
    if not policy.max_queue_size:
        text = f"{model.name} has no max_queue_size: an overloaded Triton queues without end, for callers that have long given up"
        lines = f"dynamic_batching in {file}:\n{_POLICY}" if model.dynamic_batching else f"{file}:\n{_BATCHING}"
        yield warning("queue_policy", text, f"add to {lines}")
        return
    yield ok("queue_policy", f"at most {policy.max_queue_size} requests of {model.name} queue; more are rejected at once")
    if policy.timeout_action != "REJECT":
        text = f"{model.name} runs requests whose deadline has passed all the same (timeout_action: {policy.timeout_action})"
        yield warning("queue_timeout", text, f"set in default_queue_policy in {file}: timeout_action: REJECT")
    elif not (policy.allow_timeout_override and policy.default_timeout_microseconds):
        # A request can only shorten the default, and a default of 0 counts as the shortest.
        text = f"{model.name} ignores the deadlines of requests, and runs those whose callers have given up"
        lines = "  allow_timeout_override: true\n  default_timeout_microseconds: 600000000"
        yield warning("queue_timeout", text, f"set both in default_queue_policy in {file}:\n{lines}")


def check_delay(model: ModelConfig, file: str, inference_ms: float | None) -> Finding:
    """Check how long a single request waits to be batched with others; the duration of an inference is None if it is unknown."""
    delay_ms = model.dynamic_batching.max_queue_delay_microseconds / 1e3 if model.dynamic_batching else 0.0
    text = f"a single request of {model.name} waits {delay_ms:g} ms for others to join it"
    if delay_ms < max(_USUAL_INFERENCE_MS if inference_ms is None else inference_ms, _HARMLESS_MS):
        return ok("queue_delay", text)
    if inference_ms is not None:
        text = f"{text}, and then {inference_ms:.1f} ms for its inference"
    fix = f"set in {file}: max_queue_delay_microseconds: 0; a batch then is whatever has queued while the instances were busy"
    return warning("queue_delay", text, fix)


def check_instances(model: ModelConfig, file: str, cores: float, *, is_embedded: bool) -> Iterator[Finding]:
    """Check the threads of a model on the CPUs of this machine. The embedded Triton's instances have one each by default."""
    groups = [group for group in model.instance_group if group.kind == "KIND_CPU"]
    if model.backend != "onnxruntime" or not groups:
        return
    instances = sum(group.count for group in groups)
    asked = model.parameters.get("intra_op_thread_count", ParameterValue()).string_value
    threads = int(asked) if asked.isdigit() and int(asked) else 1 if is_embedded else math.ceil(cores)
    text = f"{model.name} has {count(instances, 'instance')} of {count(threads, 'thread')} on {count(cores, 'core')}"
    fix = f"set in {file}: instance_group [ {{ count: {max(1, math.floor(cores / threads))} kind: KIND_CPU }} ]"
    if instances * threads > math.ceil(cores):
        yield warning("instances", f"{text}: they wait for each other", fix)
    elif instances * threads < cores / 2:
        yield warning("instances", f"{text}: most of the cores are idle while it runs", fix)
    else:
        yield ok("instances", text)
