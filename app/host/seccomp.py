"""A filter of system calls (seccomp), which this process and its children cannot remove."""

import ctypes
import errno
import os
import struct
from collections.abc import Sequence

# Architecture, and numbers of system calls. Source: linux/audit.h, asm/unistd.h.
_ARCHITECTURE, _NUMBERS = {
    "x86_64": (
        0xC000003E,
        {"fchmod": 91, "socket": 41, "io_uring_setup": 425, "ptrace": 101, "process_vm_writev": 311, "kill": 62},
    ),
    "aarch64": (
        0xC00000B7,
        {"fchmod": 52, "socket": 198, "io_uring_setup": 425, "ptrace": 117, "process_vm_writev": 271, "kill": 129},
    ),
}.get(os.uname().machine, (0, {}))
# Source: linux/prctl.h, linux/seccomp.h, linux/filter.h, asm/unistd.h.
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_NOT_LESS, _RETURN = 0x20, 0x15, 0x35, 6
_RET_ERRNO, _RET_ALLOW = 0x50000, 0x7FFF0000
_X32_SYSCALL_BIT = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


def answer(calls: Sequence[str], error: int) -> None:
    """Answer these system calls with an error number, 0 for success, without making them; raise OSError where this cannot be."""
    # Foreign programs, such as those of 32 bits, can make none.
    if not _NUMBERS:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    # Each step jumps over as many steps as its second number says if its condition holds, otherwise as its third says.
    checks = [(_JUMP_IF_EQUAL, len(calls) - index + 1, 0, _NUMBERS[call]) for index, call in enumerate(calls)]
    steps = [
        (_LOAD, 0, 0, 4),
        (_JUMP_IF_EQUAL, 0, len(calls) + 3, _ARCHITECTURE),
        (_LOAD, 0, 0, 0),
        (_JUMP_IF_NOT_LESS, len(calls) + 1, 0, _X32_SYSCALL_BIT),
        *checks,
        (_RETURN, 0, 0, _RET_ALLOW),
        (_RETURN, 0, 0, _RET_ERRNO | errno.ENOSYS),
        (_RETURN, 0, 0, _RET_ERRNO | error),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code)))
    for option, *arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0), (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program)):
        if _LIBC.prctl(option, *arguments, 0, 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
