"""A network on the CPU, inside the embedded Triton: while no other process runs a network, all cores run it.

A session of ONNX Runtime has a fixed number of threads, so there are two, with the same results and a common arena.
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from app.embedded.inference_lock import InferenceLock
from app.host import cores

_MAX_THREADS = 4
"""More of them spend much of their time on waking each other."""
_MIN_SECONDS = 0.01
"""CPU time of an inference from which a second session is worth its memory."""


class CpuSession:
    """What a backend needs of `onnxruntime.InferenceSession`."""

    def __init__(self, file: Path, threads: int) -> None:
        """Load a network, with so many threads while others run; raise what ONNX Runtime raises."""
        arena = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR
        onnxruntime.create_and_register_allocator(onnxruntime.OrtMemoryInfo("Cpu", arena, 0, onnxruntime.OrtMemType.DEFAULT), None)
        self._file = file
        self._session = self._fast_session = _open(file, threads)
        self.get_inputs, self.get_outputs = self._session.get_inputs, self._session.get_outputs
        self._max_threads = min(_MAX_THREADS, math.floor(cores.available()))
        self._may_have_more = self._max_threads > threads
        self._lock = InferenceLock(Path(__file__).with_name("__init__.py"))
        self._was_alone = True

    def run(self, names: Sequence[str], feed: Mapping[str, NDArray[np.generic]]) -> list[NDArray[np.generic]]:
        """Run the network; return its outputs with these names."""
        self._lock.take()
        try:
            was_alone, is_alone = self._was_alone, not self._lock.has_others()
            session = self._fast_session if was_alone and is_alone else self._session
            began = time.thread_time()
            outputs: list[NDArray[np.generic]] = session.run(names, feed)
            seconds = time.thread_time() - began
        finally:
            # Under load, another process is also without the lock for a moment, between two inferences.
            self._was_alone = is_alone and not self._lock.has_others()
            self._lock.release()
        if self._may_have_more:  # the first one, with which Triton warms up
            self._may_have_more = False
            if seconds >= _MIN_SECONDS:
                with suppress(Exception):  # there is no memory for a second one
                    self._fast_session = _open(self._file, self._max_threads)
        return outputs


def _open(file: Path, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.use_env_allocators", "1")
    if threads > 1:
        # Threads that spin take the cores from other processes. With small blocks, one that waits for a core delays others less.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.dynamic_block_base", "4")
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
