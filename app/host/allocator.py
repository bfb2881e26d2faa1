"""Settings of glibc's malloc that suit a process which allocates and frees megabytes for each request.

By default glibc returns such memory to the kernel at once, and the kernel has to zero and map it again for the next
request. That was a fifth of the CPU time of a request whose pixels travel inside the gRPC message.
"""

import ctypes

_MIB = 1 << 20
# By number, as in malloc.h.
_OPTIONS = {
    -3: 8 * _MIB,  # M_MMAP_THRESHOLD: larger blocks, such as decoded photos, are still returned at once
    -1: 16 * _MIB,  # M_TRIM_THRESHOLD: how much may stay free at the end of the heap
    -8: 1,  # M_ARENA_MAX: one heap instead of one per thread
}


def keep_freed_memory() -> None:
    """Apply the settings to this process; does nothing with another C library."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in _OPTIONS.items():
            mallopt(option, value)
