"""A wall clock that jumps."""

import asyncio
import os
import shutil
import subprocess
from datetime import datetime
from pathlib import Path

import pytest

from bench.harness.triton import Triton
from tests.faults.conftest import RecordFigure
from tests.faults.serving import serving
from tests.faults.traffic import traffic

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]

_HOUR = 3600

# Loaded before the C library, so that a program reads a wall clock that is wrong by the seconds in a file.
_SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <fcntl.h>
#include <unistd.h>
#include <sys/time.h>
#include <time.h>

static long offset(void) {
    char text[32] = {0};
    int file = open(getenv("CLOCK_OFFSET_FILE"), O_RDONLY);
    if (file < 0) return 0;
    if (read(file, text, sizeof text - 1) < 0) text[0] = 0;
    close(file);
    return atol(text);
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, time);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) time->tv_sec += offset();
    return result;
}

int gettimeofday(struct timeval *time, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    time->tv_sec = now.tv_sec;
    time->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
"""


async def test_a_clock_that_jumps(triton: Triton, tmp_path: Path, record_figure: RecordFigure) -> None:
    """Row 42: an hour forward and back, again and again, makes no request fail or wait."""
    source, shim, offset = tmp_path / "clock.c", tmp_path / "clock.so", tmp_path / "offset"
    source.write_text(_SHIM, encoding="utf-8")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(shim), str(source), "-ldl"], check=True)  # noqa: ASYNC221 - takes no time
    wrapper = ["env", f"LD_PRELOAD={shim}", f"CLOCK_OFFSET_FILE={offset}"]
    with serving(triton, tmp_path, wrapper=wrapper, settings={"model": "checksum"}) as gateway:
        async with traffic(gateway.url) as counted:
            jumps = 0
            while counted.requests < 5000 or jumps < 6:
                for seconds in (_HOUR, -_HOUR, 0):
                    written = offset.with_suffix(".new")
                    written.write_text(str(seconds), encoding="ascii")
                    os.replace(written, offset)  # noqa: PTH105 - at once
                    jumps += 1
                    await asyncio.sleep(0.5)
        logged = [datetime.fromisoformat(line["timestamp"]).timestamp() for line in gateway.log_lines()]
    counted.record(record_figure, "clock", slowest=2)

    assert set(counted.statuses) == {200}
    assert max(logged) - min(logged) > 1.9 * _HOUR, "the clock has not jumped"
