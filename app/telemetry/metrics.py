"""The metrics of the gateway."""

import platform
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from app.resilience.worker_table import COUNTER, GAUGE, WorkerTable
from app.telemetry.instruments import CommonGauge, Counter, Gauge, Histogram, WorkerGauge, read_names
from app.telemetry.timing import DRAW, FETCH, SEARCH, STAGES

REJECTIONS = ("requests", "uploads", "memory", "decoding", "models")
"""Reasons for rejecting a request while the gateway is full."""

MODEL_DEATHS = "api_model_deaths"
WRONG_ANSWERS = "api_wrong_answers"
"""`serve` reads both, too, and restarts the embedded Triton."""

REQUEST_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0)
_QUEUE_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
# More callers share a label value.
_MAX_CALLERS = 50
# Of a route and a pair of models, and of all of them, which `nereid use` makes more; further classes share a label value.
_MAX_CLASSES, _MAX_ALL_CLASSES = 50, 500
ANSWERS = ("given", "shadow")
"""Values of the label `answer`: which of the two answers that are compared."""
_STAGE_BOUNDS = (0.0005, 0.001, 0.0025, *REQUEST_BOUNDS)

_BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64)

Instruments = TypeVar("Instruments")


class Metrics:
    """The metrics of a host. Each worker has an instance; each instance reports the totals of all workers."""

    def __init__(self, table: WorkerTable, version: str, instruments: Sequence[object] = ()) -> None:
        """Count in a table; `instruments` are those of features, one object for each, which are exported, too."""
        self._version, self._instruments = version, instruments
        self._caller_labels: dict[str, str] = {}
        self._class_labels: dict[tuple[str, ...], str] = {}
        self.table = table
        self.requests = Counter(table, "api_requests", "HTTP requests.", ["endpoint", "status"])
        self.request_seconds = Histogram(
            table, "api_request_duration_seconds", "Time from a request's header to its response.", ["endpoint"], REQUEST_BOUNDS
        )
        self.batch_images = Counter(
            table, "api_batch_images", "Images of requests for batches, by the status that each has in the answer.", ["status"]
        )
        self.stage_seconds = Histogram(
            table, "api_stage_duration_seconds", "Time that requests for detection spend in each stage.", ["stage"], _STAGE_BOUNDS
        )
        self.queue_seconds = Histogram(
            table,
            "nereid_queue_seconds",
            "Time that images of a caller wait: for a thread (queue), or for a call to Triton (batch).",
            ["stage", "caller"],
            _QUEUE_BOUNDS,
        )
        self.active_requests = Gauge(table, "api_active_requests", "HTTP requests in progress.")
        self.errors = Counter(table, "api_errors", "Responses with an error, by the code in their body.", ["code"])
        self.rejections = Counter(
            table, "api_rejections", "Requests rejected because the gateway was full, by what was used up.", ["reason"], REJECTIONS
        )
        self.deadlines_missed = Counter(
            table, "api_deadlines_missed", "Requests whose deadline passed, by stage.", ["stage"], (*STAGES, FETCH, DRAW, SEARCH)
        )
        self.retries = Counter(table, "api_retries", "Inferences that were tried again, by reason.", ["reason"])
        self.inferences = Counter(
            table, "api_inferences", "Inferences by how their tensor went to Triton.", ["transport"], ("shm", "inline")
        )
        self.batch_size = Histogram(
            table, "api_inference_batch_size", "Images that went to Triton in one call.", ["model"], _BATCH_BOUNDS
        )
        self.waiting_images = Gauge(table, "api_inference_waiting_images", "Images that wait for a call to Triton.", ["model"])
        self.calls = Gauge(table, "api_inference_calls", "Calls to Triton that are under way.", ["model"])
        self.triton_images = Counter(table, "api_triton_images", "Images that were sent to each Triton.", ["triton"])
        self.triton_failures = Counter(
            table, "api_triton_failures", "Calls that a Triton has lost or has not answered.", ["triton", "model"]
        )
        self.model_deaths = Counter(
            table, MODEL_DEATHS, "Calls, also those of probes, that failed because a process of the model had died.", ["model"]
        )
        self.triton_calls = Gauge(table, "api_triton_calls", "Calls to each Triton that are under way.", ["triton"])
        self.triton_left_out = Gauge(
            table, "api_triton_left_out", "Workers that do not use a Triton for a model, because it fails.", ["triton", "model"]
        )
        self.triton_wrong = Gauge(
            table,
            "api_triton_wrong",
            "Workers that do not use a Triton for a model: its answers to the golden picture are wrong, or it has lost a process.",
            ["triton", "model"],
        )
        self.wrong_answers = Counter(
            table, WRONG_ANSWERS, "Wrong answers to the golden picture of models that had been right before.", ["model"]
        )
        self.wrong_episodes = Counter(
            table, "api_wrong_episodes", "Times that a model was left out at a Triton because of wrong answers.", ["model"]
        )
        self.worker_starts = Counter(table, "api_worker_starts", "Workers that were started, also in place of others.")
        self.model_active = Gauge(table, "api_model_active_requests", "Requests admitted to a model.", ["model"])
        self.model_waiting = Gauge(table, "api_model_waiting_requests", "Requests that wait to be admitted to a model.", ["model"])
        self.model_waiting_batch_images = Gauge(
            table,
            "api_model_waiting_batch_images",
            "Images of requests for batches that wait to be admitted to a model.",
            ["model"],
        )
        self.model_limit = CommonGauge(
            table, "api_model_request_limit", "Requests that may be admitted to a model at a time.", ["model"]
        )
        self.circuit_open = Gauge(
            table, "api_circuit_open", "Workers that reject requests for a model: the circuits of all Tritons are open.", ["model"]
        )
        self.slots = Gauge(table, "api_slots", "Slots for input tensors in shared memory.")
        self.slots_in_use = Gauge(table, "api_slots_in_use", "Slots that requests or Triton use.")
        self.decode_queue = Gauge(table, "api_decode_queue_length", "Jobs that wait for a decoding thread.")
        self.reserved_bytes = Gauge(
            table, "api_reserved_bytes", "Bytes of request bodies, of images in progress, and of batches among these.", ["purpose"]
        )
        self.reserved_limit = CommonGauge(table, "api_reserved_bytes_limit", "The most that may be reserved.", ["purpose"])
        self.workers = Gauge(table, "api_workers", "Workers that run.")
        self.workers_wanted = CommonGauge(table, "api_workers_wanted", "Workers that should run; fewer do while one cannot start.")
        self.refused_files = Gauge(
            table, "api_refused_files", "Workers that use an earlier content of a file, because it is not valid now.", ["file"]
        )
        self.worker_memory = WorkerGauge(table, "api_worker_memory_bytes", "Resident memory of each worker.")
        self.frigate_images = Counter(
            table, "api_frigate_images", "Images of Frigate's ZMQ detector: detected, or the code of an error.", ["outcome"]
        )
        self.ingested_images = Counter(
            table, "nereid_ingested_images", "Images sent to the index: added, replaced, completed, duplicate.", ["status"]
        )
        self._count_routes(table)

    def _count_routes(self, table: WorkerTable) -> None:
        self.route_requests = Counter(
            table,
            "api_route_requests",
            "Requests and images of batches that a model of a route answered, or failed to answer.",
            ["route", "model", "part", "status"],
        )
        self.canary_withdrawn = CommonGauge(
            table, "api_canary_withdrawn", "1 if the canary of a route gets no requests any more, because it failed.", ["route"]
        )
        self.shadow_images = Counter(table, "api_shadow_images", "Images for shadows, by their end.", ["route", "model", "result"])
        pair = ["route", "model", "against"]
        self.shadow_boxes = Counter(table, "api_shadow_boxes", "Boxes in the answers of two models.", [*pair, "class", "result"])
        self.shadow_iou = Histogram(table, "api_shadow_iou", "IoU of boxes that match.", [*pair, "class"], ())
        self.shadow_score = Histogram(table, "api_shadow_score", "Scores of boxes that match.", [*pair, "class", "answer"], ())
        self.shadow_seconds = Histogram(
            table, "api_shadow_infer_seconds", "Time that both models take for an image.", [*pair, "answer"], _STAGE_BOUNDS
        )

        self.step_seconds = Histogram(
            table, "nereid_cascade_step_seconds", "Time of each step of a cascade.", ["cascade", "step"], _STAGE_BOUNDS
        )
        self.search_seconds = Histogram(
            table, "nereid_search_seconds", "Time that the database of search takes.", ["operation"], _STAGE_BOUNDS
        )

    def collect(self) -> Iterator[Metric]:
        """Iterate over all metrics of the host."""
        build = GaugeMetricFamily("api_build_info", "Version of Nereid and of Python.", labels=["version", "python"])
        build.add_metric([self._version, platform.python_version()], 1)
        yield build
        counters, gauges = read_names(self.table.keys(COUNTER)), read_names(self.table.keys(GAUGE))
        aliases = self.table.aliases()
        for instrument in chain.from_iterable(vars(each).values() for each in (self, *self._instruments)):
            if isinstance(instrument, Counter | Histogram | Gauge):
                family = instrument.collect(gauges if isinstance(instrument, Gauge) else counters)
                for sample in family.samples:
                    if "triton" in sample.labels:
                        sample.labels["triton"] = aliases[sample.labels["triton"]]
                yield family

    def of(self, kind: type[Instruments]) -> Instruments:
        """Return the instruments of a feature, by their kind."""
        return next(each for each in self._instruments if isinstance(each, kind))

    def caller_label(self, name: str) -> str:
        """Return the label value for a caller: its name, or `other` if there are enough names."""
        label = self._caller_labels.get(name)
        if label is None:
            known = {values[1] for values in read_names(self.table.keys(COUNTER)).get(self.queue_seconds.name, ())}
            label = name if name in known or len(known) < _MAX_CALLERS else "other"
            self._caller_labels[name] = label
        return label

    def class_label(self, *names: str) -> str:
        """Return the label value for a class, which follows the names of a route and two models: the class, or `other`."""
        label = self._class_labels.get(names)
        if label is None:
            used = {values[:4] for values in read_names(self.table.keys(COUNTER)).get(self.shadow_boxes.name, ())}
            is_free = len(used) < _MAX_ALL_CLASSES and sum(each[:3] == names[:3] for each in used) < _MAX_CLASSES
            label = self._class_labels[names] = names[3] if names in used or is_free else "other"
        return label

    def nonzero(self, instrument: Counter | Gauge) -> dict[str, int]:
        """Return the values of a metric that has one label, by this label, without those that are 0."""
        names = read_names(self.table.keys(GAUGE if isinstance(instrument, Gauge) else COUNTER))
        samples = instrument.collect(names).samples
        return {label: int(sample.value) for sample in samples if sample.value for label in sample.labels.values()}

    def count_images(self, model: str) -> float:
        """Return how many images of all workers have gone to Triton for a model, by reference."""
        name = self.batch_size.name
        is_used = any(values[0] == model for values in read_names(self.table.keys(COUNTER)).get(name, ()))
        return self.batch_size.total(model) if is_used else 0.0

    def models(self) -> set[str]:
        """Return the models that any worker has used, by reference."""
        return {model for (model,) in read_names(self.table.keys(GAUGE)).get(self.model_active.name, ())}


class _Families(NamedTuple):
    families: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.families


def render(families: Iterable[Metric], accept: str) -> tuple[bytes, str]:
    """Render metrics in the format that a scraper's `Accept` header selects; return them and their content type."""
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # invalid version in the header
        encode, content_type = choose_encoder("")
    return encode(_Families(families)), content_type
