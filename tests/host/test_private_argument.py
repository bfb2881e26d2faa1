"""An argument that a program receives and that no other user can read, from its first moment on."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.host import private_argument
from app.host.processes import die_with_parent
from tests import processes
from tests.processes import children, wait_for
from tests.support import ROOT

SECRET = "--key=b7d1c1a6e0f94b0c8c2e"  # noqa: S105 - it protects nothing
NOBODY = 65534
NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
# Prints its arguments, each with a line feed that none of them contains, and stays.
PRINT = 'printf "%s|\\n" "$@"; exec sleep 60'

Process = subprocess.Popen[bytes]


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Demand of every test that none of its processes outlives it, not even as a zombie."""
    before = children()
    with processes.no_process_left():
        yield
    assert children() <= before


def start(command: list[str], argument: str = SECRET, **options: Any) -> Process:  # noqa: ANN401
    """Start a program with defaults for what most tests do not care about."""
    wanted: dict[str, Any] = {"env": dict(os.environ), "preexec_fn": partial(die_with_parent, os.getpid())}
    return private_argument.start(command, argument, **(wanted | {"stdout": subprocess.PIPE} | options))


@contextmanager
def running(command: list[str], argument: str = SECRET, **options: Any) -> Iterator[Process]:  # noqa: ANN401
    with start(command, argument, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def read(process: Process, lines: int = 1) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().decode().removesuffix("\n") for _ in range(lines)]


def command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().removesuffix("\0").split("\0")


def output_of(command: list[str], argument: str = SECRET, **options: Any) -> str:  # noqa: ANN401
    """Let a program run to its end, and return what it has written."""
    with start(command, argument, **options) as process:
        output, _ = process.communicate()
    assert process.returncode == 0
    return str(output.decode())


@pytest.mark.parametrize("before", [[], ["--first"], ["--first", "", "(private)", "x" * 5000]])
def test_the_program_receives_the_argument_as_the_last_one(before: list[str]) -> None:
    with running(["sh", "-c", PRINT, "sh", *before]) as process:
        assert read(process, len(before) + 1) == [f"{argument}|" for argument in (*before, SECRET)]


@pytest.mark.parametrize("argument", ["", "x", "a b", "a=b=c", "PRIVATE_ARGUMENT=x", "two\nlines", "größer", "x" * 100_000])
def test_any_text_can_be_an_argument(argument: str) -> None:
    assert output_of(["sh", "-c", 'printf %s "$1"', "sh"], argument) == argument


@pytest.mark.parametrize("variables", [{}, {"A": "1"}, {f"V{number}": "x" * number for number in range(500)}])
def test_the_environment_is_the_given_one(variables: dict[str, str]) -> None:
    """The environment also has the variable that carries the argument."""
    code = "import json, os, sys; json.dump([dict(os.environ), sys.argv[1:]], sys.stdout)"
    output = output_of([sys.executable, "-Ic", code], env=variables | {"LC_ALL": "C.UTF-8"})

    environment, arguments = json.loads(output)
    assert arguments == [SECRET]
    assert environment == variables | {"LC_ALL": "C.UTF-8", "PRIVATE_ARGUMENT": SECRET}


def test_an_inherited_variable_does_not_become_the_argument() -> None:
    """One of the same name, or of a name that begins like it, may be in the environment already."""
    env = {"PRIVATE_ARGUMENT": "old", "PRIVATE_ARGUMENTS": "others", **os.environ}

    assert output_of(["sh", "-c", 'printf %s "$1"', "sh"], env=env) == SECRET


def test_a_script_receives_the_argument(tmp_path: Path) -> None:
    """The kernel puts the interpreter in front of the script."""
    script = tmp_path / "script"
    script.write_text('#!/bin/sh\nprintf %s "$2"\n')
    script.chmod(0o755)

    assert output_of([str(script), "first"]) == SECRET


def test_the_command_line_does_not_show_the_argument() -> None:
    command = ["sh", "-c", PRINT, "sh", "first"]
    with running(command) as process:
        for _ in range(100):
            assert "key" not in repr(command_line(process.pid))
        assert read(process, 2) == ["first|", f"{SECRET}|"]
        wait_for(lambda: command_line(process.pid) == ["sleep", "60"])
    with running(["sleep", "60"], "60") as process:
        assert command_line(process.pid) == ["sleep", "60", "(private)"]
        assert process.poll() is None


def test_the_argument_is_private_before_the_first_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the program is stopped at its start, before and after its arguments are changed."""
    seen: list[list[str]] = []
    replace = private_argument._replace_last_argument  # noqa: SLF001 - the moment in question

    def look_and_replace(pid: int) -> None:
        seen.append(command_line(pid))
        replace(pid)
        seen.append(command_line(pid))

    monkeypatch.setattr(private_argument, "_replace_last_argument", look_and_replace)
    with running(["sleep", "60"], "0.5"):
        pass

    assert seen == [["sleep", "60", "(private)"]] * 2


WATCH = """
import json, os, select, sys
sought = [text.encode() for text in json.loads(sys.stdin.readline())]
names = ["cmdline"]
if os.getuid() == 0:
    names.append("environ")
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
seen = set()
while not select.select([0], [], [], 0)[0]:
    for process in filter(str.isdigit, os.listdir("/proc")):
        for name in names:
            try:
                with open(f"/proc/{process}/{name}", "rb") as file:
                    content = file.read()
            except OSError:
                continue
            seen.update((name, text.decode()) for text in sought if text in content)
    os.write(2, b".")
print(json.dumps(sorted(seen)))
"""
"""Looks for texts at all processes, again and again, as another user if it may become one. Tells of each round on stderr."""
WAIT = ["sh", "-c", "read line", "--watched-program"]
"""Ends when it is killed."""


def what_is_seen(start_program: Callable[[], Process]) -> list[list[str]]:
    """Start `WAIT` again and again while another process looks for it and for the secret; return what was seen where."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", WATCH], stdin=pipe, stdout=pipe, stderr=pipe) as watcher:
        assert watcher.stdin is not None
        assert watcher.stdout is not None
        assert watcher.stderr is not None
        watcher.stdin.write(json.dumps([SECRET, WAIT[-1]]).encode() + b"\n")
        watcher.stdin.flush()
        for _ in range(20):
            with start_program() as process:
                for _ in range(3):  # the rounds that were over before, the one under way, and a whole one
                    os.read(watcher.stderr.fileno(), 2**16)
                process.kill()
        watcher.stdin.close()
        return list(json.load(watcher.stdout))


def test_nobody_sees_the_argument_at_any_time() -> None:
    assert what_is_seen(lambda: start(WAIT, stdin=subprocess.PIPE)) == [["cmdline", WAIT[-1]]]


def test_an_argument_that_is_not_private_is_seen() -> None:
    """This proves that the other test can see what there is to see."""
    seen = what_is_seen(lambda: subprocess.Popen([*WAIT, SECRET], stdin=subprocess.PIPE))

    assert seen == [["cmdline", SECRET], ["cmdline", WAIT[-1]]]


def test_the_environment_belongs_to_the_user() -> None:
    """Only the user may read the environment, which carries the argument."""
    with running(WAIT, stdin=subprocess.PIPE) as process:
        environ = Path(f"/proc/{process.pid}/environ")
        status = environ.stat()
        assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o400, os.getuid())
        assert SECRET.encode() in environ.read_bytes()


AS_ANOTHER = """
import os, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
for name in ("cmdline", "environ", "mem", "maps", "auxv"):
    try:
        content = open(f"/proc/{sys.argv[1]}/{name}", "rb").read()
        print(name, len(content) > 0)
    except PermissionError:
        print(name, "refused")
"""


@NEEDS_ROOT
def test_another_user_cannot_read_the_environment() -> None:
    """Nor the memory, in which the argument lies as well; the command line he can."""
    with running(WAIT, stdin=subprocess.PIPE) as process:
        command = [sys.executable, "-c", AS_ANOTHER, str(process.pid)]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout

    answers = dict(line.split() for line in output.splitlines())
    assert answers["cmdline"] == "True"
    assert (answers["environ"], answers["mem"]) == ("refused", "refused")
    assert "True" not in {answers["maps"], answers["auxv"]}


@pytest.mark.parametrize(
    ("content", "mode", "expected"),
    [(None, 0, FileNotFoundError), (b"#!/bin/sh\n", 0o644, PermissionError), (b"\x7fELF for another machine", 0o755, OSError)],
)
def test_a_program_that_cannot_be_run_is_an_error(
    tmp_path: Path, content: bytes | None, mode: int, expected: type[OSError]
) -> None:
    program = tmp_path / "program"
    if content is not None:
        program.write_bytes(content)
        program.chmod(mode)

    with pytest.raises(expected):
        start([str(program)])


def test_a_preparation_that_fails_is_an_error(tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    def fail() -> None:
        raise ValueError("out of order")

    with pytest.raises(subprocess.SubprocessError):
        start(["touch", str(ran)], preexec_fn=fail)
    assert not ran.exists()


@pytest.mark.parametrize("in_child", [True, False])
def test_a_machine_that_does_not_allow_it_is_an_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_child: bool,  # noqa: FBT001
) -> None:
    """A container may forbid a process to be traced, or its memory to be written. The program has not run then."""
    ran = tmp_path / "ran"

    def refuse(*_: object) -> None:
        raise PermissionError(1, "ptrace is not permitted")

    monkeypatch.setattr(private_argument, "_ptrace" if in_child else "_replace_last_argument", refuse)
    with pytest.raises((OSError, subprocess.SubprocessError)):
        start(["sh", "-c", 'touch "$1"; exec sleep 60', "sh"], str(ran), stdout=subprocess.DEVNULL)
    assert not ran.exists()


def test_the_program_is_like_any_other_afterwards() -> None:
    """Nobody traces it; it can be stopped, continued and ended, and its exit code is known."""
    with running(["sh", "-c", 'trap "exit 7" TERM; echo ready; while :; do sleep 0.02; done', "sh"]) as process:
        assert read(process) == ["ready"]
        assert "TracerPid:\t0\n" in Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        child = psutil.Process(process.pid)
        assert process.poll() is None
        child.suspend()
        wait_for(lambda: child.status() == psutil.STATUS_STOPPED)
        child.resume()
        process.terminate()
        assert process.wait(20) == 7


def test_options_are_those_of_popen(tmp_path: Path) -> None:
    """A session of its own, a folder, files; and the preparation is made in the child."""
    prepared, output = tmp_path / "prepared", tmp_path / "output"

    def prepare() -> None:
        prepared.write_text(str(os.getpid()))

    command = ["sh", "-c", "pwd; ps -o sid= $$", "sh"]
    with output.open("wb") as file:
        process = start(command, preexec_fn=prepare, stdout=file, cwd=tmp_path, start_new_session=True)
        process.wait()

    folder, session = output.read_text().split()
    assert Path(folder) == tmp_path
    assert int(session) == process.pid == int(prepared.read_text())


def test_the_program_ends_with_its_parent() -> None:
    """`prctl` in the preparation must survive the change of program."""
    code = """
import os, signal
from functools import partial
from app.host import private_argument
from app.host.processes import die_with_parent
private_argument.start(
    ["sh", "-c", "echo $$; exec sleep 60", "sh"], "x", env=dict(os.environ), preexec_fn=partial(die_with_parent, os.getpid())
)
signal.pause()"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT) as parent:
        (pid,) = read(parent)
        child = psutil.Process(int(pid))
        parent.kill()

    processes.wait_until_gone([child])
