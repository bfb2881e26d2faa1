"""Variants of running a model, and their values in the Triton config."""

import copy
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

THREADS = "intra_op_thread_count"
"""Name of the parameter with ONNX Runtime's number of threads per instance."""

Direction = Literal[-1, 1]
UP: Direction = 1
DOWN: Direction = -1
Dimension = Literal["instances", "threads", "max_batch", "delay_us", "calls"]
DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)
"""The dimensions in the order of the search, usually the most important ones first."""

_VALUES: dict[Dimension, tuple[int, ...]] = {
    "instances": (1, 2, 3, 4, 6, 8, 12, 16),
    "threads": (1, 2, 4, 8, 16, 32, 64),
    "max_batch": (1, 2, 4, 8, 16, 32, 64),
    "delay_us": (0, 500, 1000, 2000, 5000, 10000),
    "calls": (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32),
}


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run a model. Dimensions that are None are not varied."""

    instances: int | None = None
    """Instances of the model per device."""
    threads: int | None = None
    """Threads per instance."""
    max_batch: int | None = None
    """Maximum batch size in Triton."""
    delay_us: int | None = None
    """Time that an image waits in Triton to be batched with others, in microseconds."""
    calls: int | None = None
    """Maximum number of the gateway's calls to Triton in progress; 0 means one more than the model has instances."""

    def __str__(self) -> str:
        calls = "default" if self.calls == 0 else self.calls
        delay = None if self.delay_us is None else f"{self.delay_us / 1e3:g} ms"
        parts = {"instances": self.instances, "threads": self.threads, "batch": self.max_batch, "delay": delay, "K": calls}
        return ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)

    @property
    def config(self) -> "Variant":
        """The variant without the dimensions outside of Triton's config."""
        return msgspec.structs.replace(self, calls=None)


def read_variant(config: Mapping[str, Any], *, has_threads: bool, calls: int | None) -> Variant:
    """Return the variant of a config in Triton's JSON; `has_threads` and `calls` tell whether these are varied.

    Several instance groups are not varied, nor batches of a model without them. The default number of threads is one.
    """
    groups = config.get("instance_group", [{}])
    max_batch = int(config.get("max_batch_size", 0)) or None
    threads = config.get("parameters", {}).get(THREADS, {}).get("string_value", "1")
    batching = config.get("dynamic_batching")
    return Variant(
        instances=int(groups[0].get("count", 1)) if len(groups) == 1 else None,
        threads=int(threads) if has_threads else None,
        max_batch=max_batch,
        delay_us=int(batching.get("max_queue_delay_microseconds", 0)) if max_batch and batching is not None else None,
        calls=calls,
    )


def write_variant(config: Mapping[str, Any], variant: Variant) -> dict[str, Any]:
    """Return a model's Triton config, changed to a variant.

    Values equal to the maximum batch size are changed with it: warm-ups, and the preferred size that Triton adds by itself.
    """
    old = read_variant(config, has_threads=True, calls=None)
    written: dict[str, Any] = copy.deepcopy(dict(config))
    values = {dimension: getattr(variant, dimension) for dimension in DIMENSIONS}
    wanted = {name: value for name, value in values.items() if value is not None and value != getattr(old, name)}
    if "instances" in wanted:
        written.setdefault("instance_group", [{}])[0]["count"] = wanted["instances"]
    if "threads" in wanted:
        written.setdefault("parameters", {})[THREADS] = {"string_value": str(wanted["threads"])}
    if "max_batch" in wanted:
        written["max_batch_size"] = wanted["max_batch"]
        for warm_up in written.get("model_warmup", []):
            if warm_up.get("batch_size") == old.max_batch:
                warm_up["batch_size"] = wanted["max_batch"]
        if written.get("dynamic_batching", {}).get("preferred_batch_size") == [old.max_batch]:
            written["dynamic_batching"]["preferred_batch_size"] = [wanted["max_batch"]]
    if "delay_us" in wanted:
        written["dynamic_batching"].pop("max_queue_delay_microseconds", None)
        if wanted["delay_us"]:
            written["dynamic_batching"]["max_queue_delay_microseconds"] = str(wanted["delay_us"])
    return written


def count_devices(config: Mapping[str, Any]) -> int:
    """Return the number of devices that run a model, each with its own instances."""
    return max(1, *(len(group.get("gpus", [])) for group in config.get("instance_group", [{}])))


def neighbour(variant: Variant, dimension: Dimension, direction: Direction, *, cores: int, devices: int) -> Variant | None:
    """Return the neighbour of a variant with at most `cores` threads per instance, on so many devices; None if there is none.

    More threads mean fewer instances, so that the total number of threads stays the same.
    """
    value = getattr(variant, dimension)
    usual_calls = None if variant.instances is None else variant.instances * devices + 1
    if dimension == "calls" and value == 0:
        value = usual_calls
    if value is None:
        return None
    values = _VALUES[dimension]
    place = bisect_right(values, value) if direction > 0 else bisect_left(values, value) - 1
    if not 0 <= place < len(values) or (dimension == "threads" and values[place] > cores):
        return None
    moved: dict[str, int] = {dimension: values[place]}
    if dimension == "threads" and variant.instances is not None:
        moved["instances"] = max(1, variant.instances * value // values[place])
    if dimension == "calls" and values[place] == usual_calls:
        moved["calls"] = 0
    return msgspec.structs.replace(variant, **moved)
