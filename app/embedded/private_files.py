"""Keep the files of Triton's Python backend in /dev/shm private: they contain images, and it makes them readable for everybody."""

import ctypes
import os
import struct

# Architecture and number of the system call fchmod. Source: linux/audit.h, asm/unistd.h.
_ARCHITECTURE, _FCHMOD = {"x86_64": (0xC000003E, 91), "aarch64": (0xC00000B7, 52)}.get(os.uname().machine, (0, 0))
_NO_NEW_PRIVILEGES, _SECCOMP, _BY_FILTER = 38, 22, 2
# Load the architecture; if it is that, load the number; if it is that of fchmod, succeed without doing it; otherwise, allow.
# Source: linux/filter.h, linux/seccomp.h.
_STEPS = (
    (0x20, 0, 0, 4),
    (0x15, 0, 3, _ARCHITECTURE),
    (0x20, 0, 0, 0),
    (0x15, 0, 1, _FCHMOD),
    (6, 0, 0, 0x50000),
    (6, 0, 0, 0x7FFF0000),
)
_CODE = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in _STEPS))
_PROGRAM = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(_STEPS), ctypes.addressof(_CODE)))
_LIBC = ctypes.CDLL(None)


def keep_files_private() -> None:
    """Make all files that this process and its children create private, also against their own `fchmod`."""
    os.umask(0o077)
    _LIBC.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _LIBC.prctl(_SECCOMP, _BY_FILTER, _PROGRAM, 0, 0)
