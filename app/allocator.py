"""glibc's malloc, told to keep the memory that pictures free.

By its defaults it hands every megabyte back to the kernel, only to have it zeroed and faulted in again for the next
picture. That was a fifth of the CPU time of a request whose pixels travel inside it.
"""

import ctypes

_MIB = 1 << 20
# By number, as in malloc.h.
_OPTIONS = {
    -3: 8 * _MIB,  # M_MMAP_THRESHOLD: what is larger, such as a photo, still goes back at once
    -1: 16 * _MIB,  # M_TRIM_THRESHOLD: how much may be free at the end of the heap
    -8: 1,  # M_ARENA_MAX: one heap, not one for each thread
}


def keep_freed_memory() -> None:
    """Set it for this process; without effect where the C library is another."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in _OPTIONS.items():
            mallopt(option, value)
