"""Start a program with an argument that other users of this machine cannot read.

/proc shows every user the command line of every process, but its environment only to its own user. So the argument lies in
the environment, and the program's last argument, a placeholder, is made to point there before the program's first instruction.
"""

import ctypes
import os
import struct
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

_VARIABLE = "PRIVATE_ARGUMENT"
_PLACEHOLDER = "(private)"
# Loaded once: a child that is being made while another thread holds the loader's lock could not.
_LIBC = ctypes.CDLL(None, use_errno=True)
_PTRACE_TRACEME, _PTRACE_DETACH = 0, 17
_WORD = struct.Struct("P")
# Of /proc/PID/stat, counted from behind the program's name: the address at which the stack began.
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
        argument: One more, which is private.
        env: Its environment.
        preexec_fn: As `subprocess.Popen` takes it.
        **options: More of them.

    Raises:
        OSError: The program cannot be run, or this machine does not allow a process to be changed by its parent.
        subprocess.SubprocessError: `preexec_fn` failed, or this machine does not allow a process to be traced.
    """

    def prepare() -> None:
        preexec_fn()
        _ptrace(_PTRACE_TRACEME, 0)  # exec will stop the process

    process = subprocess.Popen(  # noqa: S603 - the caller's command line
        [*command, _PLACEHOLDER],
        env={**env, _VARIABLE: argument},
        preexec_fn=prepare,  # noqa: PLW1509 - it takes no lock
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
    """Let the last argument of a program that has not begun to run point to the value of the variable.

    Its stack begins with the number of arguments, pointers to them, 0, pointers to the variables, 0.
    """
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:  # noqa: PTH123 - beside os.open
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
