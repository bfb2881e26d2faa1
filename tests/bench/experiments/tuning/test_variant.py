"""What can be varied, and where it is in a config."""

import msgspec
import pytest

from bench.experiments.tuning.variant import (
    DOWN,
    UP,
    Dimension,
    Direction,
    Variant,
    count_devices,
    neighbour,
    read_variant,
    write_variant,
)

CONFIG = {
    "max_batch_size": 16,
    "instance_group": [{"count": 2, "kind": "KIND_GPU", "gpus": [0, 1]}],
    "dynamic_batching": {"preferred_batch_size": [16], "max_queue_delay_microseconds": "500"},
    "model_warmup": [{"name": "one", "batch_size": 1}, {"name": "largest", "batch_size": 16}],
    "parameters": {"labels": {"string_value": "cat"}},
}
PRESENT = Variant(instances=2, threads=1, max_batch=16, delay_us=500, calls=0)


def test_a_variant_is_read_from_a_config() -> None:
    """The number of threads is one where the config has none; numbers of 64 bits are strings in JSON."""
    assert read_variant(CONFIG, has_threads=True, calls=0) == PRESENT
    assert count_devices(CONFIG) == 2


def test_settings_that_a_config_lacks_are_not_varied() -> None:
    groups = [{"kind": "KIND_CPU"}, {"kind": "KIND_GPU"}]

    assert read_variant({"instance_group": groups}, has_threads=False, calls=None) == Variant()
    assert read_variant({"max_batch_size": 4}, has_threads=False, calls=3) == Variant(instances=1, max_batch=4, calls=3)


def test_a_written_variant_is_read_again() -> None:
    """Triton would reject a warm-up that is larger than the largest batch."""
    wanted = Variant(instances=3, threads=2, max_batch=8, delay_us=0, calls=0)
    written = write_variant(CONFIG, wanted)

    assert read_variant(written, has_threads=True, calls=0) == wanted
    assert written["dynamic_batching"] == {"preferred_batch_size": [8]}
    assert [warm_up["batch_size"] for warm_up in written["model_warmup"]] == [1, 8]
    assert written["instance_group"][0]["gpus"] == [0, 1]
    assert written["parameters"]["labels"] == {"string_value": "cat"}
    assert CONFIG["max_batch_size"] == 16


@pytest.mark.parametrize(
    ("dimension", "direction", "changes"),
    [
        ("instances", UP, {"instances": 3}),
        ("instances", DOWN, {"instances": 1}),
        ("threads", UP, {"threads": 2, "instances": 1}),
        ("threads", DOWN, None),
        ("max_batch", UP, {"max_batch": 32}),
        ("delay_us", DOWN, {"delay_us": 0}),
        ("calls", UP, {"calls": 6}),
        ("calls", DOWN, {"calls": 4}),
    ],
)
def test_a_step_changes_one_thing(dimension: Dimension, direction: Direction, changes: dict[str, int] | None) -> None:
    """But more threads take the cores of instances. By default there is one call more than instances on all devices."""
    expected = None if changes is None else msgspec.structs.replace(PRESENT, **changes)

    assert neighbour(PRESENT, dimension, direction, cores=2, devices=2) == expected


def test_steps_end_at_the_cores_and_come_back_to_the_default() -> None:
    two_threads = Variant(instances=1, threads=2, calls=3)

    assert neighbour(two_threads, "threads", UP, cores=2, devices=1) is None
    assert neighbour(two_threads, "calls", DOWN, cores=2, devices=1) == Variant(instances=1, threads=2, calls=0)
    assert neighbour(Variant(calls=0), "calls", UP, cores=2, devices=1) is None
