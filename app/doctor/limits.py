"""Checks that the resources of the host or container are sufficient for the settings."""

import math
import resource
from collections.abc import Iterator

from app.doctor.finding import Finding, count, failure, ok, warning
from app.host import cores, memory
from app.host.processes import MAX_CONNECTIONS, RESERVED_FILES, connections_within
from app.settings.schema import PREFIX, Settings
from app.triton import shared_memory

_MIB = 2**20
# UINT8 image of 640 x 640 pixels; used if the model is unknown.
_USUAL_SLOT_BYTES = 640 * 640 * 3
# Four are as fast as two: bench/results.
_THREADS_PER_CORE = 4
# Margin for Triton's Python backend.
_SPARE = 1.25


def check(settings: Settings, slot_bytes: int | None, *, maps_memory: bool) -> Iterator[Finding]:
    """Check cores, open files and memory; the size of the default model's input for one image is None if the model is unknown."""
    arena = shared_memory.arena_bytes(slot_bytes or _USUAL_SLOT_BYTES)
    has_arenas = maps_memory and settings.transport != "inline"
    yield from _check_cores(settings, cores.available())
    yield _check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    if has_arenas:
        yield _check_shared_memory(settings, arena, shared_memory.room())
    yield from _check_memory(settings, memory.available_bytes(), arena if has_arenas else 0)


def _check_cores(settings: Settings, available: float) -> Iterator[Finding]:
    workers, threads = cores.workers_of_host(settings.workers, settings.instances), settings.decode_threads
    best = cores.workers(0, settings.instances)
    text = f"{count(workers, 'worker')} for {count(available, 'core')}"
    if workers > max(math.ceil(available), settings.instances):
        yield warning("workers", f"{text}: they wait for each other", f"{PREFIX}WORKERS={best}")
        return
    if workers < available / 2 and workers < cores.workers_of_host(0, settings.instances):
        yield warning("workers", f"{text}: Python runs on only {workers} of them at a time", f"{PREFIX}WORKERS={best}")
        return
    yield ok("workers", text)
    text = f"{count(workers * threads, 'decoding thread')} for {count(available, 'core')}"
    if workers * threads > _THREADS_PER_CORE * math.ceil(available):
        yield warning("decode_threads", f"{text}: they only take memory", f"{PREFIX}DECODE_THREADS=2")
    elif workers * threads < min(math.floor(available), memory.workers_that_fit()):
        yield warning("decode_threads", f"{text}: not all cores can decode", f"{PREFIX}DECODE_THREADS=2")
    else:
        yield ok("decode_threads", text)


def _check_open_files(soft: int, hard: int) -> Finding:
    # A worker raises its soft limit to the hard limit.
    wanted = MAX_CONNECTIONS + RESERVED_FILES
    text = (
        f"a worker may open {hard} files (hard limit; soft {soft} is raised), which allows {connections_within(hard)} connections"
    )
    fix = (
        f"docker run --ulimit nofile={wanted}:{wanted}; LimitNOFILE={wanted} in a systemd unit; ulimit -Hn {wanted} in root's shell"
    )
    if hard <= RESERVED_FILES:
        return failure("open_files", f"{text}: it needs {RESERVED_FILES} for itself", fix)
    if hard < wanted:
        return warning("open_files", f"{text} of {MAX_CONNECTIONS}; further clients wait without an answer", fix)
    return ok("open_files", text)


def _check_shared_memory(settings: Settings, arena: int, room: int | None) -> Finding:
    workers = cores.workers_of_host(settings.workers, settings.instances)
    need = workers * arena
    size = f"{math.ceil(need / _MIB * _SPARE)}m"
    text = f"each of {workers} workers needs {math.ceil(arena / _MIB)} MiB of /dev/shm"
    fix = f"docker run --shm-size={size}, or mount -o remount,size={size} /dev/shm"
    if not arena:
        return warning(
            "dev_shm", "images of this model are too large for shared memory", "give the model a smaller or a UINT8 input"
        )
    if room is None:
        room, text = 0, f"{text}, which does not exist"
    else:
        text = f"{text}, which has room for {room / _MIB:.0f} MiB"
    if room >= need:
        return ok("dev_shm", text)
    if settings.transport == "shm":
        return failure("dev_shm", f"{text}: {workers - room // arena} of them can send nothing", fix)
    return warning("dev_shm", f"{text}: {workers - room // arena} of them copy pixels into each request", fix)


def _check_memory(settings: Settings, available: int, arena: int) -> Iterator[Finding]:
    # Triton's memory is not included.
    try:
        from app.imaging.decode import max_request_bytes  # noqa: PLC0415 - its dependencies may be missing
        from app.imaging.header import PixelLimits  # noqa: PLC0415
    except ImportError:  # reported by `jpeg_decoder`
        return
    body = max(settings.max_body_bytes, settings.max_batch_bytes)
    largest = max_request_bytes(PixelLimits(settings.max_pixels, settings.max_pixels_non_jpeg), body)
    workers = cores.workers_of_host(settings.workers, settings.instances)
    images = memory.image_budget(settings.memory_mb, largest)
    need = 2 * images + workers * (memory.WORKER_BYTES + arena)
    text = f"images and bodies may take {images / _MIB:.0f} MiB each, all in all {need / _MIB:.0f} of {available / _MIB:.0f} MiB"
    if (fraction := memory.fraction_that_fits(largest, workers)) < 1:
        shrunk = settings.shrunk(fraction)
        sizes = f"{shrunk.max_megapixels:g} megapixels, and bodies {shrunk.max_file_size_mb:g} MiB"
        text = f"{available / _MIB:.0f} MiB are too little for the largest images, even without Triton: they may have {sizes}"
        yield warning(
            "memory",
            text,
            f"{math.ceil(need / _MIB / 256) * 256} MiB for {count(workers, 'worker')}, or smaller limits of your own",
        )
    elif need > available:
        fix = (
            f"{PREFIX}MAX_MEGAPIXELS=12, {PREFIX}MAX_FILE_SIZE_MB=10 and {PREFIX}MAX_BATCH_SIZE_MB=20, fewer {PREFIX}WORKERS, "
            f"or {math.ceil(need / _MIB / 256) * 256} MiB of memory for {count(workers, 'worker')}"
        )
        yield warning("memory", f"{text}: the kernel may kill workers", fix)
    elif 0 < settings.memory_mb * _MIB < largest:
        text = f"{PREFIX}MEMORY_MB={settings.memory_mb} is not kept to: the largest request needs {largest / _MIB:.0f} MiB"
        yield warning("memory", text, f"{PREFIX}MEMORY_MB={math.ceil(largest / _MIB)}, or a smaller {PREFIX}MAX_MEGAPIXELS")
    else:
        yield ok("memory", text)
