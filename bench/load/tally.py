"""Counts the responses of one run."""

from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from statistics import median
from time import perf_counter
from typing import Any

import msgspec

from bench.load.outcome import Outcome, encode_latencies

CHECK_EVERY = 17
"""After the first pass over the images, one of this many responses is parsed and checked; a prime, to get to all images."""

REJECTIONS = {"429", "503"}
"""Statuses of responses that ask the client to retry later."""

_NOT_OVERHEAD = b"decode", b"batch", b"infer"


class _Named(msgspec.Struct):
    class_name: str


class _Predicted(msgspec.Struct):
    class_name: str = msgspec.field(name="class")


class _Answer(msgspec.Struct):
    detections: list[_Named] | None = None
    classifications: list[_Named] | None = None
    """Results of a classifier, instead of detections."""
    predictions: list[_Predicted] | None = None
    """Detections of Roboflow's interface."""
    model: Any = None
    """`{"name": ...}` from Nereid; other servers may put anything here."""

    @property
    def names(self) -> list[str] | None:
        """Class names in the response; None if it contains no results."""
        named = next((one for one in (self.detections, self.classifications, self.predictions) if one is not None), None)
        return None if named is None else [one.class_name for one in named]

    @property
    def model_name(self) -> str:
        name = self.model.get("name") if isinstance(self.model, dict) else None
        return name if isinstance(name, str) else ""


class _Problem(msgspec.Struct):
    code: str = ""


_decoder = msgspec.json.Decoder(_Answer)
_problem_decoder = msgspec.json.Decoder(_Problem)


class Tally:
    """Statuses, latencies and stages of one run.

    Decoding JSON costs CPU time that the server may need, so all responses of the first pass over the images are checked, but only
    some of the later ones.
    """

    def __init__(self, expected: Sequence[frozenset[str] | None], patience: float, seconds: float) -> None:
        """Prepare to count.

        Args:
            expected: Class names, one set per image; None for an image whose responses are not read.
            patience: The latency of an abandoned request counts if it is longer than this.
            seconds: Duration of sending; correct responses within it are the goodput.
        """
        self.ended = 0
        """Number of answered or abandoned requests."""
        self.check_every = CHECK_EVERY
        self._expected = expected
        self._patience = patience
        self._seconds = seconds
        self._in_time = 0
        self._statuses: Counter[str] = Counter()
        self._codes: defaultdict[str, set[str]] = defaultdict(set)
        self._latency = array("d")
        self._rejections = array("d")
        self._delays = array("d")
        self._overhead = array("d")
        self._stages: defaultdict[bytes, float] = defaultdict(float)
        self._timed = 0
        self._model = ""
        self._start = self._last = 0.0

    def start(self) -> None:
        """Start the clock."""
        self._start = self._last = perf_counter()

    def due(self, delay: float) -> None:
        """Record that the driver handled a request `delay` seconds after it was due."""
        self._delays.append(delay)

    def answered(self, number: int, since: float, status: str, body: bytes, timing: bytes) -> str:
        """Count the response to the request with this number, whose latency began at `since`; return its result."""
        count = len(self._expected)
        is_read = number < count or not number % self.check_every
        expected = self._expected[number % count]
        if status == "200" and is_read and expected is not None and not self._check(body, expected):
            status = "wrong"
        self._count(status)
        elapsed = self._last - since
        if status == "200":
            self._in_time += self._last - self._start <= self._seconds
            self._latency.append(elapsed)
            if timing:
                self._add_timing(timing, elapsed)
        else:
            if status in REJECTIONS:
                self._rejections.append(elapsed)
            if status != "wrong" and (is_read or status not in self._codes):
                self._add_code(status, body)
        return status

    def gave_up(self, since: float) -> None:
        """Count a request without a response; its time counts only after the full wait."""
        self._count("error")
        if self._last - since > self._patience:
            self._latency.append(self._last - since)

    def outcome(self, driver_cpu: float) -> Outcome:
        """Summarize the run."""
        seconds = max(self._last - self._start, 1e-9)
        return Outcome(
            seconds=seconds,
            requests=self.ended,
            statuses=dict(sorted(self._statuses.items())),
            codes={status: sorted(codes) for status, codes in sorted(self._codes.items())},
            latency=encode_latencies(self._latency),
            rejections=encode_latencies(self._rejections) if self._rejections else "",
            goodput=self._in_time / min(seconds, self._seconds),
            delay_p99=sorted(self._delays)[int(0.99 * len(self._delays))] * 1e3 if self._delays else 0.0,
            stages={name.decode("latin-1"): total / self._timed for name, total in self._stages.items()},
            driver_cpu=driver_cpu,
            overhead_p50=median(self._overhead) if self._overhead else 0.0,
            model=self._model,
        )

    def _count(self, status: str) -> None:
        self._last = perf_counter()
        self.ended += 1
        self._statuses[status] += 1

    def _check(self, body: bytes, expected: frozenset[str]) -> bool:
        """Return whether the expected classes are among the results; store the model's name."""
        try:
            answer = _decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        self._model = self._model or answer.model_name
        return answer.names is not None and expected <= {*answer.names}

    def _add_code(self, status: str, body: bytes) -> None:
        """Store the code of an error in Nereid's format, from the gateway or NGINX."""
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            if code := _problem_decoder.decode(body).code:
                self._codes[status].add(code)

    def _add_timing(self, timing: bytes, elapsed: float) -> None:
        self._timed += 1
        overhead = elapsed * 1e3
        for entry in timing.split(b","):
            name, _, parameters = entry.strip().partition(b";")
            milliseconds = float(parameters.partition(b"dur=")[2].partition(b";")[0] or 0)
            self._stages[name] += milliseconds
            if name in _NOT_OVERHEAD:
                overhead -= milliseconds
        self._overhead.append(overhead)
