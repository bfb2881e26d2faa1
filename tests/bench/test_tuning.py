"""Tuning: what can be varied, which variant is chosen, what is written, and that nothing else is changed."""

import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest

from app.settings.schema import Settings
from app.triton.config_file import read_config_file
from app.triton.repository import config_path
from app.zoo.description import Description, Serving
from app.zoo.recipe import DetectionRecipe
from app.zoo.repository import Repository
from bench.experiments.tune import result_lines
from bench.experiments.tuning import config_text
from bench.experiments.tuning.search import Figures, Trial, choose, figures, hold_rounds, search
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
from bench.harness.errors import ContestantError
from bench.harness.model_control import ModelControl
from bench.harness.processes import ROOT, environment_of, variables
from bench.harness.triton import embedded_triton
from bench.models.repository import write_fixture
from tests.bench.support import make_outcome
from tests.processes import wait_for

CONFIG = {
    "max_batch_size": 16,
    "instance_group": [{"count": 2, "kind": "KIND_GPU", "gpus": [0, 1]}],
    "dynamic_batching": {"preferred_batch_size": [16], "max_queue_delay_microseconds": "500"},
    "model_warmup": [{"name": "one", "batch_size": 1}, {"name": "largest", "batch_size": 16}],
    "parameters": {"labels": {"string_value": "cat"}},
}
PRESENT = Variant(instances=2, threads=1, max_batch=16, delay_us=500, calls=0)
ONE, TWO, THREE, FOUR = (Variant(instances=count) for count in (1, 2, 3, 4))
MODEL = "wait_20"
INTERRUPTED = 130


def trial(throughput: float, milliseconds: float | None = 10.0) -> Trial:
    """Make up a trial with such a latency; None: the fixed rate was too high."""
    return Trial(throughput, 5.0, None if milliseconds is None else make_outcome([milliseconds] * 20))


def test_variant_is_read_from_a_config_and_written_into_it() -> None:
    """Triton would reject a warm-up that is larger than the largest batch. Numbers of 64 bits are strings in JSON."""
    wanted = Variant(instances=3, threads=2, max_batch=8, delay_us=0, calls=0)
    written = write_variant(CONFIG, wanted)

    assert read_variant(CONFIG, has_threads=True, calls=0) == PRESENT
    assert read_variant({"instance_group": [{}, {}]}, has_threads=False, calls=None) == Variant()
    assert count_devices(CONFIG) == 2
    assert read_variant(written, has_threads=True, calls=0) == wanted
    assert written["dynamic_batching"] == {"preferred_batch_size": [8]}
    assert [warm_up["batch_size"] for warm_up in written["model_warmup"]] == [1, 8]
    assert written["instance_group"][0]["gpus"] == [0, 1]
    assert CONFIG["max_batch_size"] == 16


@pytest.mark.parametrize(
    ("dimension", "direction", "changes"),
    [
        ("instances", UP, {"instances": 3}),
        ("instances", DOWN, {"instances": 1}),
        ("threads", UP, {"threads": 2, "instances": 1}),  # they take the cores of instances
        ("threads", DOWN, None),
        ("delay_us", DOWN, {"delay_us": 0}),
        ("calls", UP, {"calls": 6}),  # by default there is one more than instances on all devices
        ("calls", DOWN, {"calls": 4}),
    ],
)
def test_step_changes_one_dimension(dimension: Dimension, direction: Direction, changes: dict[str, int] | None) -> None:
    expected = None if changes is None else msgspec.structs.replace(PRESENT, **changes)

    assert neighbour(PRESENT, dimension, direction, cores=2, devices=2) == expected


def test_trials_are_summed_up_and_throughput_counts_more_than_latency() -> None:
    found = figures([trial(10.0, 5.0), trial(30.0, 5.0), trial(20.0, 50.0)])
    rejected = Trial(20.0, 15.0, make_outcome([5.0] * 95, s200=95, s429=5))

    assert (found.throughput, round(found.p50), round(found.p99)) == (20, 5, 50)
    for one in (trial(20.0, None), rejected):
        assert figures([trial(20.0), one]) == Figures(20.0, float("inf"), float("inf"))
    assert Figures(20.0, 5.0, 10.0).score > Figures(10.0, 5.0, 5.0).score > Figures(10.0, 5.0, 10.0).score


def test_search_finds_the_best_of_several_dimensions_and_ends_in_time() -> None:
    start, step = Variant(instances=1, threads=1, max_batch=1, delay_us=0, calls=0), partial(neighbour, cores=4, devices=1)

    def measure(variant: Variant) -> Trial:
        return trial(100.0 - 10 * abs((variant.instances or 0) - 3) - 5 * abs((variant.max_batch or 0) - 4))

    tried = search(start, measure(start), step, measure)
    assert max(tried, key=lambda one: tried[one].throughput) == msgspec.structs.replace(start, instances=3, max_batch=4)
    assert len(tried) < 20
    assert list(search(start, measure(start), step, lambda _: None)) == [start]


@pytest.mark.parametrize(("left", "count"), [([0], 3), ([3, 1], 4), ([9, 9], 5)])
def test_rounds_are_interleaved_at_the_rate_of_the_first_variant(left: list[int], count: int) -> None:
    asked: list[tuple[Variant, float | None]] = []
    remaining = iter(left)

    def measure(variant: Variant, rate: float | None) -> Trial | None:
        asked.append((variant, rate))
        return None if variant == THREE else trial(20.0)

    rounds = hold_rounds([ONE, THREE, TWO], measure, lambda: next(remaining))

    assert asked == [(ONE, None), (THREE, 5.0), (TWO, 5.0), *[(ONE, None), (TWO, 5.0)] * (count - 1)]
    assert {variant: len(trials) for variant, trials in rounds.items()} == {ONE: count, TWO: count}


@pytest.mark.parametrize(
    ("other", "chosen"),
    [
        ([trial(24.0, 9.0), trial(12.0, 9.0), trial(25.0, 9.0)], TWO),
        ([trial(20.2, 9.9), trial(10.1, 9.9), trial(21.2, 9.9)], ONE),
        ([trial(40.0), trial(10.0), trial(40.0)], ONE),
        ([trial(40.0, 20.0), trial(20.0, 20.0), trial(42.0, 20.0)], ONE),
        ([trial(18.0, 1.0), trial(9.0, 1.0), trial(19.0, 1.0)], ONE),
        ([trial(40.0), trial(20.0), trial(40.0, None)], ONE),
    ],
    ids=["better", "hardly better", "better but once", "latency lost", "throughput lost", "overloaded once"],
)
def test_present_variant_stays_within_the_noise(other: list[Trial], chosen: Variant) -> None:
    """The machine may have been busy in one round, as in the second one here."""
    present = [trial(rate) for rate in (20.0, 10.0, 21.0)]
    last = [*result_lines({}, rounds := {ONE: present, TWO: other}, ONE, choose(rounds, ONE))][-1]

    assert choose(rounds, ONE) == chosen
    assert choose({ONE: present[:2], TWO: other[:2]}, ONE) == ONE
    assert last.startswith("choice: instances 2: 1.20 x (1.19..1.20) the throughput" if chosen == TWO else "choice: as it is")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_batch_size: 4", "max_batch_size: 8\n\ninstance_group [ { count: 3 } ]\n"),
        ("max_batch_size:4 instance_group { kind: KIND_CPU }", "max_batch_size:8 instance_group { count: 3 kind: KIND_CPU }"),
        (
            '# max_batch_size: 4\nname: "a # b" max_batch_size: 4 # "\ninstance_group [{ count : 1 }] # count: 1',
            '# max_batch_size: 4\nname: "a # b" max_batch_size: 8 # "\ninstance_group [{ count : 3 }] # count: 1',
        ),
        (
            "max_batch_size: 4 instance_group { count: 1 } model_warmup { batch_size: 1 } model_warmup { batch_size: 4 }",
            "max_batch_size: 8 instance_group { count: 3 } model_warmup { batch_size: 1 } model_warmup { batch_size: 8 }",
        ),
    ],
    ids=["without instances", "without a count", "comments", "warm-up"],
)
def test_config_is_edited_as_it_is_written(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_text(text, encoding="utf-8")

    assert config_text.edit(path, Variant(instances=3, max_batch=8)) == expected


def test_file_is_replaced_at_once_with_its_mode(tmp_path: Path) -> None:
    path, link = tmp_path / "config.pbtxt", tmp_path / "link"
    path.write_text("instance_group { rate_limiter { priority: 1 } count: 2 }", encoding="utf-8")
    with pytest.raises(ContestantError, match=r"config\.pbtxt is written in a way .* edit it yourself: instances 3$"):
        config_text.edit(path, THREE)
    path.chmod(0o640)
    link.symlink_to(path)
    config_text.write(link, "max_batch_size: 8", Variant(max_batch=8))

    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode), link.is_symlink()) == ("max_batch_size: 8", 0o640, True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["config.pbtxt", "link"]


def test_choice_for_an_added_model_is_in_its_description(tmp_path: Path) -> None:
    recipe = DetectionRecipe(size=(64, 64), head="yolo")
    found = Description(labels=("a",), default_version=1, last_version=1, versions={"1": ""}, recipe=recipe)
    repository = Repository(tmp_path)
    (tmp_path / "doors").mkdir()
    repository.write("doors", found)
    file = config_path(tmp_path / "doors", is_embedded=True)
    variant = Variant(instances=3, threads=2, max_batch=8, delay_us=500)
    config_text.write(file, config_text.edit(file, variant), variant)

    assert read_variant(read_config_file(file), has_threads=True, calls=None) == variant
    assert repository.load("doors").embedded == Serving(instances=3, threads=2, max_batch=8, delay_us=500)  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def reloadable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """Settings for a Triton elsewhere that runs `wait_20`."""
    repository = tmp_path_factory.mktemp("reloadable")
    write_fixture("wait_20", repository)
    with embedded_triton(repository, "wait_20") as triton:
        yield msgspec.structs.replace(triton.settings, triton_endpoints=triton.settings.triton_address)


@contextmanager
def tuning(settings: dict[str, str], *options: str, seconds: int = 60) -> Iterator["subprocess.Popen[str]"]:
    environment = {**environment_of(ROOT), **settings, "NEREID_WORKERS": "1"}
    command = [sys.executable, "-m", "bench", "tune", MODEL, "--clients=8", f"--seconds={seconds}", *options]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def embedded(tmp_path: Path) -> Settings:
    """Settings with a model repository with one instance of the model, which can do 20 images a second."""
    write_fixture(MODEL, tmp_path / "models")
    return Settings(model_repository=str(tmp_path / "models"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_triton_elsewhere_is_as_it_was_after_an_interruption(reloadable: Settings, number: int) -> None:
    control = ModelControl(reloadable, MODEL)
    before = control.read()
    with tuning(variables(reloadable)) as process:
        wait_for(lambda: control.read() != before)
        process.send_signal(number)
        shown, errors = process.communicate()

    assert (process.returncode, shown) == (INTERRUPTED, "")
    assert errors.splitlines()[-1] == "stopped; the config is as it was"
    assert control.read() == before


def test_config_that_triton_cannot_load_or_does_not_use_is_one_line(reloadable: Settings, embedded: Settings) -> None:
    control = ModelControl(reloadable, MODEL)
    before = control.read()
    with pytest.raises(ContestantError, match=rf"^Triton does not load {MODEL}: load failed .*nonsense"), control.restored():
        control.load({**before, "backend": "nonsense"})
    assert control.read() == before

    file = Path(embedded.model_repository, MODEL, "config.pbtxt")
    file.write_text(file.read_text().replace("count: 1", "count: 4"))
    settings = msgspec.structs.replace(reloadable, model_repository=embedded.model_repository)
    with tuning(variables(settings), "--write") as process:
        _, errors = process.communicate()
    assert errors.startswith(f"{file} is not the config that Triton uses: instances 4, batch 1, K default; it uses: instances 1,")
