"""Measure variants of a model: a new API process for each, in front of a Triton that runs the variant."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
from google.protobuf import text_format
from google.protobuf.json_format import ParseDict
from tritonclient.grpc import model_config_pb2

from app.host.program import CommandError
from app.settings.schema import Settings
from app.triton.config_file import read_config_file
from app.triton.repository import config_path, loadable_models
from bench.experiments.tuning.search import TOLERATED, Trial
from bench.experiments.tuning.variant import Variant, write_variant
from bench.harness.errors import ContestantError
from bench.harness.model_control import ModelControl
from bench.harness.ports import find_free
from bench.harness.processes import running, variables
from bench.harness.triton import embedded_triton
from bench.load.driver import PATIENCE_SECONDS, Driver, run
from bench.load.images import Sample
from bench.load.outcome import Outcome
from bench.load.tally import REJECTIONS
from bench.models.repository import link_model

SHARE = 0.7
"""The fixed rate, as a share of the current variant's capacity."""

# The load comes from this machine, without keys, and waits for each response. With a short deadline, the gateway would reject
# requests to a slow variant, and clients that retry at once would keep the machine busy.
_MEASURED = {
    "host": "127.0.0.1",
    "socket": "",
    "api_keys_file": "",
    "drain_delay_seconds": 0.0,
    "timeout_seconds": PATIENCE_SECONDS,
    "max_timeout_seconds": PATIENCE_SECONDS,
}
_WARM_UP_CLIENTS = 4
_WARM_UP_SHARE = 0.25


class Host(NamedTuple):
    """Runs variants of a model."""

    config: Mapping[str, Any]
    """The model's current config as Triton's JSON."""
    has_threads: bool
    """Whether the config sets the number of threads per instance."""
    run: Callable[[Variant], Settings]
    """Runs a variant; returns the settings for its Triton, or raises ContestantError."""


@contextmanager
def host_of(settings: Settings, model: str) -> Iterator[Host]:
    """Yield a host for a model: the running Triton in the settings, or else an embedded Triton per variant.

    The running Triton loads the model's config of before when the block ends. Raises ContestantError if it does not respond, or the
    model does not exist.
    """
    if "," in settings.triton_endpoints:
        raise ContestantError("name one Triton in NEREID_TRITON_ENDPOINTS: each is tuned by itself")
    settings = msgspec.structs.replace(settings, model=model)
    with ExitStack() as stack:
        if not settings.triton_endpoints:
            yield _embedded_host(Path(settings.model_repository).resolve(), model, stack)
            return
        control = ModelControl(settings, model)
        config = stack.enter_context(control.restored())

        def reload(variant: Variant) -> Settings:
            control.load(write_variant(config, variant))
            return settings

        yield Host(config, has_threads=False, run=reload)  # other backends use all cores by default


def _embedded_host(repository: Path, model: str, stack: ExitStack) -> Host:
    """Return a host that starts a Triton for each variant, with a copy of the model's config; the user's is not changed."""
    if model not in loadable_models(repository):
        raise ContestantError(f"{model} is not in {repository}; ./just pull gets the models that it knows")
    file = config_path(repository / model, is_embedded=True)
    config = read_config_file(file)
    triton = stack.enter_context(ExitStack())

    def start(variant: Variant) -> Settings:
        triton.close()
        folder = Path(triton.enter_context(TemporaryDirectory(prefix="nereid-bench-")))
        written = ParseDict(write_variant(config, variant), model_config_pb2.ModelConfig())
        link_model(repository / model, folder, {file: text_format.MessageToString(written)})
        try:
            return triton.enter_context(embedded_triton(folder, model)).settings
        except CommandError as error:
            raise ContestantError(str(error)) from error

    return Host(config, config.get("backend") == "onnxruntime", start)


class Stand:
    """Measures variants of a model with the same two loads: clients that send requests back to back, and a fixed rate."""

    def __init__(self, host: Host, samples: Sequence[Sample], clients: int, seconds: float, logs: Path) -> None:
        """Prepare for trials of twice so many seconds."""
        self._host = host
        self._samples = samples
        self._clients = clients
        self._seconds = seconds
        self._log = logs / "api.log"
        self._running: tuple[Variant, Settings] | None = None

    def measure(self, variant: Variant, rate: float | None = None) -> Trial:
        """Measure a variant; without a rate for its second load, it gets a share of its throughput.

        Raises:
            ContestantError: The variant cannot be run, or returns wrong results.
        """
        if self._running is None or self._running[0] != variant.config:
            self._running = None
            self._running = variant.config, self._host.run(variant.config)
        with self._api(self._running[1], variant.calls) as url:
            self._ask_again(url, _WARM_UP_CLIENTS, self._seconds * _WARM_UP_SHARE)
            throughput = self._ask_again(url, self._clients, self._seconds).rate
            rate = rate or throughput * SHARE
            if throughput <= rate:
                return Trial(throughput, rate, None)
            return Trial(throughput, rate, run(Driver(url, self._samples, self._seconds).constant(rate)))

    def _ask_again(self, url: str, clients: int, seconds: float) -> Outcome:
        outcome = run(Driver(url, self._samples, seconds).closed(clients))
        failed = sum(count for status, count in outcome.statuses.items() if status not in {"200", *REJECTIONS})
        if not outcome.correct or failed > TOLERATED * outcome.correct:
            answers = ", ".join(f"{count} x {status}" for status, count in outcome.statuses.items())
            raise ContestantError(f"not all answers are correct: {answers or 'there was none'}")
        return outcome

    @contextmanager
    def _api(self, settings: Settings, calls: int | None) -> Iterator[str]:
        """Run the API until the block ends; yield the URL for posting images."""
        (port,) = find_free(1)
        changes: dict[str, Any] = {} if calls is None else {"calls_in_flight": calls}
        settings = msgspec.structs.replace(settings, **_MEASURED, port=port, **changes)
        with running([sys.executable, "-m", "app", "api"], variables(settings), port, "/readyz", self._log) as server:
            yield f"{server.url}/predict/{settings.model}"
