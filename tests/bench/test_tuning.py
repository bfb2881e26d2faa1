"""Tuning: what can be varied, which variant is chosen, what is written, and that nothing else is changed."""

import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bench.experiments.tuning.search import Trial, choose
from bench.experiments.tuning.variant import DOWN, UP, Dimension, Direction, Variant, neighbour, read_variant, write_variant
from bench.harness.errors import ContestantError
from bench.harness.model_control import ModelControl
from bench.harness.processes import ROOT, environment_of, variables
from bench.harness.triton import embedded_triton
from bench.models.repository import write_fixture
from tests.bench.test_statistics import make_outcome
from tests.processes import wait_for

CONFIG = {
    "max_batch_size": 16,
    "instance_group": [{"count": 2, "kind": "KIND_GPU", "gpus": [0, 1]}],
    "dynamic_batching": {"preferred_batch_size": [16], "max_queue_delay_microseconds": "500"},
    "model_warmup": [{"name": "one", "batch_size": 1}, {"name": "largest", "batch_size": 16}],
    "parameters": {"labels": {"string_value": "cat"}},
}
PRESENT = Variant(instances=2, threads=1, max_batch=16, delay_us=500, calls=0)
ONE, TWO = Variant(instances=1), Variant(instances=2)
MODEL = "wait_20"


def trial(throughput: float, milliseconds: float | None = 10.0) -> Trial:
    """Make up a trial with such a latency; None: the fixed rate was too high."""
    return Trial(throughput, 5.0, None if milliseconds is None else make_outcome([milliseconds] * 20))


def test_variant_is_read_from_a_config_and_written_into_it() -> None:
    """Triton would reject a warm-up that is larger than the largest batch. Numbers of 64 bits are strings in JSON."""
    wanted = Variant(instances=3, threads=2, max_batch=8, delay_us=0, calls=0)
    written = write_variant(CONFIG, wanted)

    assert read_variant(CONFIG, has_threads=True, calls=0) == PRESENT
    assert read_variant(written, has_threads=True, calls=0) == wanted
    assert written["dynamic_batching"] == {"preferred_batch_size": [8]}
    assert [warm_up["batch_size"] for warm_up in written["model_warmup"]] == [1, 8]
    assert written["instance_group"][0]["gpus"] == [0, 1]


@pytest.mark.parametrize(
    ("dimension", "direction", "changes"),
    [
        ("instances", UP, {"instances": 3}),
        ("threads", UP, {"threads": 2, "instances": 1}),  # they take the cores of instances
        ("threads", DOWN, None),
        ("calls", UP, {"calls": 6}),  # by default there is one more than instances on all devices
    ],
)
def test_step_changes_one_dimension(dimension: Dimension, direction: Direction, changes: dict[str, int] | None) -> None:
    expected = None if changes is None else msgspec.structs.replace(PRESENT, **changes)

    assert neighbour(PRESENT, dimension, direction, cores=2, devices=2) == expected


@pytest.mark.parametrize(
    ("other", "chosen"),
    [
        ([trial(24.0, 9.0), trial(12.0, 9.0), trial(25.0, 9.0)], TWO),
        ([trial(20.2, 9.9), trial(10.1, 9.9), trial(21.2, 9.9)], ONE),
        ([trial(40.0), trial(10.0), trial(40.0)], ONE),
        ([trial(40.0, 20.0), trial(20.0, 20.0), trial(42.0, 20.0)], ONE),
        ([trial(40.0), trial(20.0), trial(40.0, None)], ONE),
    ],
    ids=["better", "hardly better", "better but once", "latency lost", "overloaded once"],
)
def test_present_variant_stays_within_the_noise(other: list[Trial], chosen: Variant) -> None:
    """The machine may have been busy in one round, as in the second one here."""
    present = [trial(rate) for rate in (20.0, 10.0, 21.0)]

    assert choose({ONE: present, TWO: other}, ONE) == chosen
    assert choose({ONE: present[:2], TWO: other[:2]}, ONE) == ONE


def test_triton_elsewhere_is_as_it_was_after_an_interruption(tmp_path: Path) -> None:
    write_fixture(MODEL, tmp_path)
    with embedded_triton(tmp_path, MODEL) as triton:
        settings = msgspec.structs.replace(triton.settings, triton_endpoints=triton.settings.triton_address)
        control = ModelControl(settings, MODEL)
        before = control.read()
        environment = {**environment_of(ROOT), **variables(settings), "NEREID_WORKERS": "1"}
        command = [sys.executable, "-m", "bench", "tune", MODEL, "--clients=8", "--seconds=20"]
        with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
            try:
                wait_for(lambda: control.read() != before)
                process.send_signal(signal.SIGINT)
                _, errors = process.communicate()
            finally:
                process.kill()

        assert process.returncode == 130  # interrupted
        assert errors.splitlines()[-1] == "stopped; the config is as it was"
        assert control.read() == before
        with pytest.raises(ContestantError, match=rf"^Triton does not load {MODEL}: load failed .*nonsense"), control.restored():
            control.load({**before, "backend": "nonsense"})
        assert control.read() == before
