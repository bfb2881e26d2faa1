"""Tune a model for this machine: instances, threads, batches, delays, and calls in progress."""

import argparse
import os
import signal
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from time import monotonic

import msgspec

from app import feature
from app.settings.schema import PREFIX
from app.triton.config_file import read_config_file
from app.triton.repository import DESCRIPTION, config_path
from app.zoo import description
from app.zoo.description import Description, Serving
from app.zoo.repository import Repository
from bench.experiments.options import Commands, add_shared, positive
from bench.experiments.tuning.search import (
    GAIN,
    MIN_ROUNDS,
    Figures,
    Trial,
    choose,
    figures,
    finalists,
    hold_rounds,
    search,
)
from bench.experiments.tuning.stand import SHARE, Stand, host_of
from bench.experiments.tuning.variant import Variant, count_devices, neighbour, read_variant
from bench.harness.errors import ContestantError
from bench.load.images import unlabelled_samples
from bench.report.progress import say
from bench.report.text import spread

_SECONDS = 300.0
_SEARCH_SHARE = 0.55
"""Share of the time for the search; the rest is for comparing the best variants with the current one."""
_TRIALS = 60
"""Each part of a trial takes 1/60 of the time, within a minimum and a maximum."""
_MIN_PART_SECONDS, _MAX_PART_SECONDS = 0.5, 8.0
_RECENT = 4


class Budget:
    """Trials within a time budget; each result is shown."""

    def __init__(self, stand: Stand, seconds: float) -> None:
        self._stand = stand
        self._seconds = seconds
        self._end = monotonic() + seconds
        self._took: deque[float] = deque(maxlen=_RECENT)

    def measure(self, variant: Variant, rate: float | None = None) -> Trial:
        """Measure a variant. Raises the same errors as `Stand.measure`."""
        start = monotonic()
        say(f"{max(0, self._end - start):.0f} s left: {variant}")
        trial = self._stand.measure(variant, rate)
        self._took.append(monotonic() - start)
        _note(_line(figures([trial]), str(variant)))
        return trial

    def attempt(self, variant: Variant, rate: float | None, *, within: float | None = None) -> Trial | None:
        """Measure a variant; return None if it cannot be run, or would exceed a share of the time.

        The second trial is always run: without it, nothing can be compared.
        """
        if within is not None and len(self._took) > 1 and not self.trials_left(within):
            return None
        try:
            return self.measure(variant, rate)
        except ContestantError as error:
            _note(f"  left out: {variant}: {error}")
            return None

    def trials_left(self, share: float = 1.0) -> int:
        """Return the number of trials that fit in the rest of a share of the time, based on the last trials."""
        left = self._end - (1 - share) * self._seconds - monotonic()
        return max(0, int(left / mean(self._took)))


def run(options: argparse.Namespace) -> int:
    """Measure variants of a model; print or write the best one."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # restore Triton's config when terminated
    try:
        return _tune(options)
    except KeyboardInterrupt:
        print("stopped; the config is as it was", file=sys.stderr)
        raise


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("tune", help="find the instances, threads, batches, delays and calls for a model")
    command.add_argument("model", nargs="?", help="name of the model; default: NEREID_MODEL")
    command.add_argument(
        "--seconds", type=positive, default=_SECONDS, help="about how long it may take; a comparison takes eight trials at least"
    )
    command.add_argument("--write", action="store_true", help="write the choice into the model's description, model.toml")
    add_shared(command, clients=32)
    command.set_defaults(run=run)


def _tune(options: argparse.Namespace) -> int:
    given = feature.read_settings()
    model = options.model or given.model
    folder = Path(given.model_repository, model)
    part = min(max(options.seconds / _TRIALS, _MIN_PART_SECONDS), _MAX_PART_SECONDS)
    with ExitStack() as stack:
        logs = Path(stack.enter_context(TemporaryDirectory(prefix="nereid-bench-")))
        host = stack.enter_context(host_of(given, model))
        if "ensemble_scheduling" in host.config:
            raise ContestantError(f"{model} is an ensemble; tune the models that it consists of")
        present = read_variant(host.config, has_threads=host.has_threads, calls=given.calls_in_flight)
        if options.write:
            _require_description(folder, present, is_embedded=not given.triton_endpoints)
        stand = Stand(host, unlabelled_samples(), options.clients, part, logs)
        budget = Budget(stand, options.seconds)
        first = budget.measure(present)
        step = partial(neighbour, cores=len(os.sched_getaffinity(0)), devices=count_devices(host.config))
        tried = search(present, first, step, lambda variant: budget.attempt(variant, first.rate, within=_SEARCH_SHARE))
        rounds = hold_rounds(finalists(tried, present, budget.trials_left()), budget.attempt, budget.trials_left)
    chosen = choose(rounds, present)
    say()
    print(f"{model}: throughput with {options.clients} clients, latency at {SHARE:.0%} of what the present config bears")
    print("\n".join(result_lines(rounds, present, chosen)))
    if chosen.config != present.config:
        if options.write:
            write_choice(folder, chosen, is_embedded=not given.triton_endpoints)
        print(f"{'written' if options.write else 'to write with --write'}: {chosen.config}")
    if chosen.calls != present.calls:
        print(f"to set: {PREFIX}CALLS_IN_FLIGHT={chosen.calls}")
    return 0


def write_choice(folder: Path, chosen: Variant, *, is_embedded: bool) -> None:
    """Write a variant into the description of a model, of which its configs are made."""
    found, kind = _describe(folder), "embedded" if is_embedded else "production"
    values = {name: getattr(chosen, name) for name in Serving.__struct_fields__}
    given = {name: value for name, value in values.items() if value is not None}
    serving = msgspec.structs.replace(getattr(found, kind), **given)
    repository = Repository(folder.parent)
    with repository.writing():
        repository.write(folder.name, msgspec.structs.replace(found, **{kind: serving}))


def _describe(folder: Path) -> Description:
    found = description.load(folder)
    if found is None:
        raise ContestantError(f"{folder} has no {DESCRIPTION} for --write to change; without it, the values are shown")
    return found


def _require_description(folder: Path, present: Variant, *, is_embedded: bool) -> None:
    """Raise ContestantError if a model's config is not that of the running model, or is not made of a description."""
    file = config_path(folder, is_embedded=is_embedded)
    written = read_variant(read_config_file(file), has_threads=present.threads is not None, calls=present.calls)
    if written != present:
        raise ContestantError(f"{file} is not the config that Triton uses: {written}; it uses: {present}")
    _describe(folder)


def result_lines(rounds: Mapping[Variant, Sequence[Trial]], present: Variant, chosen: Variant) -> Iterator[str]:
    """Describe the interleaved rounds, and the choice."""
    found = {variant: figures(trials) for variant, trials in rounds.items()}
    count = min(map(len, rounds.values()), default=0)
    yield f"  {'images/s':>8} {'p50 ms':>8} {'p99 ms':>8}   {count} interleaved rounds"
    for variant, values in sorted(found.items(), key=lambda item: -item[1].throughput):
        note = " (present)" if variant == present else ""
        yield _line(values, f"{variant}{note}")
    if chosen != present:
        ratios = [
            figures([one]).throughput / figures([base]).throughput
            for one, base in zip(rounds[chosen], rounds[present], strict=False)
        ]
        p99 = found[chosen].p99 / found[present].p99
        yield f"choice: {chosen}: {spread(ratios)} the throughput, {p99:.2f} x the p99"
    elif count < MIN_ROUNDS:
        yield "choice: as it is; it could not be compared with another"
    else:
        yield f"choice: as it is; nothing was better by {GAIN - 1:.0%} in every round"


def _line(values: Figures, text: str) -> str:
    latencies = " ".join("       -" if value == float("inf") else f"{value:8.1f}" for value in values[1:])
    return f"  {values.throughput:8.1f} {latencies}   {text}"


def _note(line: str) -> None:
    say()
    print(line, file=sys.stderr)
