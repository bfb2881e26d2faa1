"""Time the steps of one candidate: python -m bench.experiments.candidates NAME FOLDER SECONDS [STEP ...].

NAME is a candidate, FOLDER contains the images, and STEPs select the steps to time. The last line of the output is JSON:
`images`, their number; `seconds`, the duration; and `milliseconds`, the CPU time per image by step. With a Triton at
BENCH_TRITON (its gRPC endpoint), `client` is a whole inference
(message, RPC, result) by the model `null`, and `framework` a whole request to the web application with a pipeline that returns a
constant result.

`bench stages --before DIR` runs this program in other checkouts: command line, variable and JSON must not change.
"""

import json
import sys
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from bench.experiments.candidates.registry import Step, steps_of


def main(name: str, folder: Path, seconds: float, wanted: list[str]) -> None:
    """Run the steps on one image after the other, and print their CPU time."""
    images = [file.read_bytes() for file in sorted(folder.iterdir())]
    steps = steps_of(name)
    if wanted:
        steps = {step: work for step, work in steps.items() if step in wanted}
    for image in images:  # warm up libraries and allocator
        _run(steps, image, {})
    totals: dict[str, float] = {}
    count, start = 0, perf_counter()
    while (elapsed := perf_counter() - start) < seconds:
        _run(steps, images[count % len(images)], totals)
        count += 1
    milliseconds = {step: total / count * 1e3 for step, total in totals.items()}
    print(json.dumps({"images": count, "seconds": elapsed, "milliseconds": milliseconds}), flush=True)


def _run(steps: dict[str, Step], value: Any, totals: dict[str, float]) -> None:  # noqa: ANN401 - steps differ in it
    kept = [value]  # otherwise the time of a step would include freeing the previous one's objects
    for step, work in steps.items():
        before = process_time()
        kept.append(work(kept[-1]))
        totals[step] = totals.get(step, 0.0) + process_time() - before
    before = process_time()
    kept.clear()
    totals["free"] = totals.get("free", 0.0) + process_time() - before


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
