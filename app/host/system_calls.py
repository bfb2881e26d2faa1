"""A filter of system calls (seccomp), which this process and its children cannot remove."""

import ctypes
import errno
import os
import struct
from collections.abc import Sequence

# Architecture, and numbers of system calls. Source: linux/audit.h, asm/unistd.h.
_ARCHITECTURE, _NUMBERS = {
    "x86_64": (0xC000003E, {"fchmod": 91, "socket": 41, "io_uring_setup": 425}),
    "aarch64": (0xC00000B7, {"fchmod": 52, "socket": 198, "io_uring_setup": 425}),
}.get(os.uname().machine, (0, {}))
_NO_NEW_PRIVILEGES, _SECCOMP, _BY_FILTER = 38, 22, 2
_LOAD, _IF_EQUAL, _IF_NOT_LESS, _RETURN = 0x20, 0x15, 0x35, 6
_ANSWER, _ALLOW = 0x50000, 0x7FFF0000
_FOREIGN = 0x40000000  # numbers of another set of calls (x32)
_LIBC = ctypes.CDLL(None)


def answer(calls: Sequence[str], error: int) -> None:
    """Answer the system calls of these names with an error number, or with success if that is 0, without making them.

    Foreign programs, such as those of 32 bits, can make none. On other machines than x86-64 and aarch64, nothing is filtered.
    Source: linux/filter.h, linux/seccomp.h.
    """
    if not _NUMBERS:
        return
    # Each step jumps over as many steps as its second number says if its condition holds, otherwise as its third says.
    checks = [(_IF_EQUAL, len(calls) - index + 1, 0, _NUMBERS[call]) for index, call in enumerate(calls)]
    steps = [
        (_LOAD, 0, 0, 4),
        (_IF_EQUAL, 0, len(calls) + 3, _ARCHITECTURE),
        (_LOAD, 0, 0, 0),
        (_IF_NOT_LESS, len(calls) + 1, 0, _FOREIGN),
        *checks,
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ANSWER | errno.ENOSYS),
        (_RETURN, 0, 0, _ANSWER | error),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code)))
    _LIBC.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _LIBC.prctl(_SECCOMP, _BY_FILTER, program, 0, 0)
