"""Start a program with an argument that other users of this machine cannot read.

In /proc, every user can read the command line of a process, but only its own user can read the environment. So the argument is
passed in the environment, and the pointer to the last argument, a placeholder, is redirected there before the program's first
instruction.
"""

import ctypes
import os
import struct
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

_VARIABLE = "PRIVATE_ARGUMENT"
_PLACEHOLDER = "(private)"
# Loaded at import: a forked child cannot load it while another thread holds the loader's lock.
_LIBC = ctypes.CDLL(None, use_errno=True)
_PTRACE_TRACEME, _PTRACE_DETACH = 0, 17
_WORD = struct.Struct("P")
# Index in /proc/PID/stat, after the program's name, of the start address of the stack.
_START_STACK = 25


def start(
    command: list[str],
    argument: str,
    *,
    env: Mapping[str, str],
    preexec_fn: Callable[[], None],
    **options: Any,  # noqa: ANN401
) -> "subprocess.Popen[bytes]":
    """Start a program.

    Args:
        command: The program and its arguments.
        argument: The private last argument.
        env: Its environment.
        preexec_fn: As for `subprocess.Popen`.
        **options: Other options of `subprocess.Popen`.

    Raises:
        OSError: The program cannot be run, or this machine does not allow a parent to modify its child.
        subprocess.SubprocessError: `preexec_fn` failed, or this machine does not allow tracing.
    """

    def prepare() -> None:
        preexec_fn()
        _ptrace(_PTRACE_TRACEME, 0)  # makes exec stop the process

    process = subprocess.Popen(  # noqa: S603 - the caller's command line
        [*command, _PLACEHOLDER],
        env={**env, _VARIABLE: argument},
        preexec_fn=prepare,  # noqa: PLW1509 - takes no lock
        **options,
    )
    try:
        os.waitpid(process.pid, 0)
        _replace_last_argument(process.pid)
        _ptrace(_PTRACE_DETACH, process.pid)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process


def _replace_last_argument(pid: int) -> None:
    """Redirect the pointer to the last argument of a stopped program to the value of the variable.

    The initial stack contains the number of arguments, the pointers to them, 0, the pointers to the variables, 0.
    """
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:  # noqa: PTH123 - consistent with os.open
        stack = int(file.read().rpartition(")")[2].split()[_START_STACK])
    prefix = f"{_VARIABLE}=".encode()
    memory = os.open(f"/proc/{pid}/mem", os.O_RDWR)
    try:

        def read(address: int) -> int:
            return int(_WORD.unpack(os.pread(memory, _WORD.size, address))[0])

        last_argument = stack + _WORD.size * read(stack)
        variable = last_argument + 2 * _WORD.size
        while os.pread(memory, len(prefix), read(variable)) != prefix:
            variable += _WORD.size
        os.pwrite(memory, _WORD.pack(read(variable) + len(prefix)), last_argument)
    finally:
        os.close(memory)


def _ptrace(request: int, pid: int) -> None:
    if _LIBC.ptrace(ctypes.c_long(request), ctypes.c_long(pid), None, None) < 0:
        raise OSError(ctypes.get_errno(), "ptrace is not permitted")
