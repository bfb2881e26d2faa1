"""Flame graphs of processes, recorded by py-spy."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.harness.errors import ContestantError

_SAMPLES_PER_SECOND = 200
_WRITE_SECONDS = 60
_IDLE = "No stack counts found"


@contextmanager
def recording(pid: int, seconds: int, out: Path) -> Iterator[None]:
    """Record a process from the start of the block on; at its end, wait for the flame graph.

    Args:
        pid: The process.
        seconds: Seconds to record.
        out: SVG file to write; there is none if the process was idle all the time.

    Raises:
        ContestantError: py-spy is not installed, or fails; the message has its reason.
    """
    program = shutil.which("py-spy")
    if program is None:
        raise ContestantError("py-spy is not installed; run: ./just")
    command = [program, "record", "--nonblocking", "--duration", str(seconds), "--rate", str(_SAMPLES_PER_SECOND)]
    command += ["--output", str(out.resolve()), "--pid", str(pid)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as recorder:
        try:
            yield
            _, said = recorder.communicate(timeout=seconds + _WRITE_SECONDS)
        finally:
            recorder.kill()
    if recorder.returncode and _IDLE in said:
        out.unlink()
    elif recorder.returncode:
        reason = said.partition("\n")[0].removeprefix("Error: ")
        raise ContestantError(f"py-spy: {reason}\nWithout root it needs a process of this user, and kernel.yama.ptrace_scope = 0")
