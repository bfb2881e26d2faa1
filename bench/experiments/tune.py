"""Tune a model for this machine: instances, threads, batches, delays, and calls in progress."""

import argparse
import os
import signal
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from app.settings import environment
from app.settings.schema import PREFIX
from app.triton.config_file import read_config_file
from app.triton.repository import config_path
from bench.experiments.options import Commands, add_shared, positive
from bench.experiments.progress import BudgetBar
from bench.experiments.tuning import config_text
from bench.experiments.tuning.choice import choose
from bench.experiments.tuning.hosts import host_of
from bench.experiments.tuning.rounds import finalists, hold_rounds
from bench.experiments.tuning.search import search
from bench.experiments.tuning.session import Session
from bench.experiments.tuning.stand import SHARE, Load, Stand
from bench.experiments.tuning.text import result_lines
from bench.experiments.tuning.variant import Variant, count_devices, neighbour, read_variant
from bench.harness.errors import ContestantError
from bench.load.images import unlabelled_samples

_SECONDS = 300.0
_SEARCH_SHARE = 0.55
"""Share of the time for the search; the rest is for comparing the best variants with the current one."""
_TRIALS = 60
"""Each part of a trial takes 1/60 of the time, within a minimum and a maximum."""
_MIN_PART_SECONDS, _MAX_PART_SECONDS = 0.5, 8.0


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
    share = f"{SHARE:.0%}".replace("%", " %%")
    command.add_argument(
        "--rate", type=positive, help=f"requests per second for the latency; default: {share} of what is borne now"
    )
    command.add_argument("--write", action="store_true", help="write the choice into the model's config file")
    add_shared(command, clients=32, images=None)
    command.set_defaults(run=run)


def _tune(options: argparse.Namespace) -> int:
    given = environment.load()
    model = options.model or given.model
    file = config_path(Path(given.model_repository, model), is_embedded=not given.triton_endpoints)
    seconds = min(max(options.seconds / _TRIALS, _MIN_PART_SECONDS), _MAX_PART_SECONDS)
    load = Load(unlabelled_samples(options.images), options.clients, seconds, options.rate)
    with ExitStack() as stack:
        logs = Path(stack.enter_context(TemporaryDirectory(prefix="nereid-bench-")))
        host = stack.enter_context(host_of(given, model))
        if "ensemble_scheduling" in host.config:
            raise ContestantError(f"{model} is an ensemble; tune the models that it consists of")
        present = read_variant(host.config, has_threads=host.has_threads, calls=given.calls_in_flight)
        if options.write:
            _require_file(file, present)
        bar = stack.enter_context(BudgetBar(options.seconds))
        stand = Stand(host, load, logs=logs, progress=bar.tick)
        session = Session(stand, bar, options.seconds)
        first = session.measure(present)
        step = partial(neighbour, cores=len(os.sched_getaffinity(0)), devices=count_devices(host.config))
        tried = search(present, first, step, lambda variant: session.attempt(variant, first.rate, within=_SEARCH_SHARE))
        rounds = hold_rounds(finalists(tried, present, session.trials_left()), session.attempt, session.trials_left)
    chosen = choose(rounds, present)
    rate = f"{options.rate:g} images/s" if options.rate else f"{SHARE:.0%} of what the present config bears"
    print(f"{model}: throughput with {options.clients} clients, latency at {rate}")
    print("\n".join(result_lines(tried, rounds, present, chosen)))
    if chosen != present:
        _apply(file, chosen, present, is_written=options.write)
    return 0


def _require_file(file: Path, present: Variant) -> None:
    """Check that a file is the config of the running model.

    Raises:
        ContestantError: It is another config.
        ConfigFileError: It cannot be read.
    """
    written = read_variant(read_config_file(file), has_threads=present.threads is not None, calls=present.calls)
    if written != present:
        raise ContestantError(f"{file} is not the config that Triton uses: {written}; it uses: {present}")


def _apply(file: Path, chosen: Variant, present: Variant, *, is_written: bool) -> None:
    """Print the changes, and write them to the file if `is_written`."""
    if chosen.config != present.config and (is_written or file.is_file()):
        text = config_text.edit(file, chosen)
        print("\n".join([f"{'written' if is_written else 'to write with --write'}: {file}", *config_text.difference(file, text)]))
        if is_written:
            config_text.write(file, text, chosen)
    if chosen.calls != present.calls:
        print(f"to set: {PREFIX}CALLS_IN_FLIGHT={chosen.calls}")
