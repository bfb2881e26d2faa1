"""Settings of the allocators that suit a process which allocates and frees megabytes for each request.

By default glibc returns such memory to the kernel at once, and the kernel has to zero and map it again for the next
request. That was a fifth of the CPU time of a request whose pixels travel inside the gRPC message.
"""

import ctypes
import os

_MIB = 1 << 20
# By number, as in malloc.h.
_OPTIONS = {
    -3: 8 * _MIB,  # M_MMAP_THRESHOLD: larger blocks, such as decoded photos, are still returned at once
    -1: 16 * _MIB,  # M_TRIM_THRESHOLD: how much may stay free at the end of the heap
    -8: 1,  # M_ARENA_MAX: one heap instead of one per thread
}


def set_granian_decay() -> None:
    """Let Granian's own allocator give memory back that has been free for half a second, instead of ten.

    To be called before Granian is imported. It takes effect whenever the allocator is used.
    """
    os.environ.setdefault("_RJEM_MALLOC_CONF", "dirty_decay_ms:500,muzzy_decay_ms:0")


def return_freed_memory() -> None:
    """Give the memory that is free in the heap back to the kernel; does nothing with another C library."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def keep_freed_memory() -> None:
    """Apply the settings to this process; does nothing with another C library."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in _OPTIONS.items():
            mallopt(option, value)
