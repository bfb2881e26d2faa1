"""Child processes: waited for, ended, and never left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import cast

import psutil
import pytest

from app.host.processes import MAX_CONNECTIONS, RESERVED_FILES, connections_within, end_group, kill_group, wait_for_answer
from tests.processes import has_ended, nothing_left_running, wait_until_gone  # noqa: F401 - a fixture
from tests.support import ROOT, free_port

Process = subprocess.Popen[bytes]


@pytest.mark.parametrize(("how", "prepare"), [("SIGTERM", ":"), ("SIGKILL", "trap '' TERM")])
def test_child_ends_with_its_parent(how: str, prepare: str) -> None:
    code = f"""
import os, signal, subprocess
from functools import partial
from app.host.processes import die_with_parent
child = "{prepare}; echo $$; while :; do sleep 0.05; done"
subprocess.Popen(["sh", "-c", child], preexec_fn=partial(die_with_parent, os.getpid(), signal.{how}))
signal.pause()"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        process = psutil.Process(int(parent.stdout.readline()))
        parent.kill()

    wait_until_gone([process])


def test_child_ends_with_its_parent_by_sigterm_unless_told_otherwise() -> None:
    """The milder signal is the default, so that a child can clean up."""
    code = """
import os, signal, subprocess
from functools import partial
from app.host.processes import die_with_parent
child = "trap 'echo told; exit' TERM; echo ready; while :; do sleep 0.05; done"
subprocess.Popen(["sh", "-c", child], preexec_fn=partial(die_with_parent, os.getpid()))
signal.pause()"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        parent.kill()
        assert parent.stdout.read() == b"told\n"


def test_child_ends_if_its_parent_has_ended_already() -> None:
    """The kernel signals only an end that comes later."""
    code = "from app.host.processes import die_with_parent; die_with_parent(1); print('alive')"
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, check=False)

    assert (child.returncode, child.stdout) == (-signal.SIGTERM, b"")


class Handler(BaseHTTPRequestHandler):
    """Gives the next of the server's answers: a status, bytes that are not HTTP, or None: nothing until the test is over."""

    server: "HttpServer"

    def do_GET(self) -> None:
        self.server.asked += 1
        answer = self.server.answers.pop(0) if self.server.answers else 200
        if isinstance(answer, bytes):
            self.wfile.write(answer)
        if answer is None:
            self.server.is_over.wait()
        if not isinstance(answer, int):
            self.close_connection = True
            return
        self.send_response(answer)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


class HttpServer(ThreadingHTTPServer):
    def __init__(self, *answers: int | bytes | None, port: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.answers = list(answers)
        self.asked = 0
        self.is_over = Event()
        self.url = f"http://127.0.0.1:{self.server_port}/ready"


@contextmanager
def answering(*answers: int | bytes | None, port: int = 0) -> Iterator[HttpServer]:
    with HttpServer(*answers, port=port) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.is_over.set()
            server.shutdown()
            thread.join()


@contextmanager
def running(command: str) -> Iterator[Process]:
    """Run a shell command as the leader of a process group; its output is a pipe."""
    process = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, start_new_session=True)
    try:
        yield process
    finally:
        kill_group(process)
        assert process.stdout is not None
        process.stdout.close()


def read_line(process: Process) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


@pytest.fixture
def sleeper() -> Iterator[Process]:
    with running("exec sleep 60") as process:
        yield process


@pytest.mark.parametrize("status", [200, 204, 400, 404, 500, 503])
def test_first_answer_is_final(sleeper: Process, status: int) -> None:
    """Whatever the status is, it is returned, and the server is asked once."""
    with answering(status) as server:
        assert wait_for_answer(server.url, sleeper, 10) == status
        assert server.asked == 1


def test_statuses_to_retry_are_not_final(sleeper: Process) -> None:
    """After one of these the server is asked again, until it answers with another one."""
    with answering(503, 400, 503, 404) as server:
        assert wait_for_answer(server.url, sleeper, 10, retry={503, 400}) == 404
        assert server.asked == 4


@pytest.mark.parametrize(
    "answer", [b"", b"220 mail.example.org ESMTP\r\n", b"HTTP/1.1 twohundred OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nX"]
)
def test_answer_that_is_not_http_is_not_an_answer(sleeper: Process, answer: bytes) -> None:
    with answering(answer, 200) as server:
        assert wait_for_answer(server.url, sleeper, 10) == 200


def test_server_that_says_nothing_is_asked_again(sleeper: Process) -> None:
    """A connection that is accepted but not answered is given up after a second."""
    with answering(None, 200) as server:
        assert wait_for_answer(server.url, sleeper, 60) == 200
        assert server.asked == 2


def looked_after(*looks: Callable[[], int | None]) -> Process:
    """Make a process that does something each time when it is asked for its exit code, which is before each request."""
    left = iter(looks)

    def poll() -> int | None:
        return next(left)()

    return cast("Process", SimpleNamespace(poll=poll))


def test_server_that_does_not_listen_yet_is_waited_for() -> None:
    port = free_port()
    with ExitStack() as stack:

        def listen() -> None:
            stack.enter_context(answering(404, port=port))

        process = looked_after(lambda: None, lambda: None, listen)
        assert wait_for_answer(f"http://127.0.0.1:{port}/no-such-file", process, 60) == 404


def test_waiting_ends_when_the_process_ends() -> None:
    """A server that has ended will not answer any more, however much time is left."""
    assert wait_for_answer(f"http://127.0.0.1:{free_port()}/", looked_after(lambda: None, lambda: 3)) is None


def test_waiting_ends_when_the_process_ends_between_retries() -> None:
    """A process that ends stops the retries after a 503 as well."""
    with answering(503, 503) as server:
        assert wait_for_answer(server.url, looked_after(lambda: None, lambda: 3), retry={503}) is None
        assert server.asked == 1


def test_waiting_ends_when_the_time_is_over(sleeper: Process) -> None:
    """Without an answer, waiting ends at the time-out, and the process goes on."""
    start = time.monotonic()

    assert wait_for_answer(f"http://127.0.0.1:{free_port()}/", sleeper, 0.3) is None
    assert time.monotonic() - start >= 0.3
    assert sleeper.poll() is None


def test_waiting_ends_when_the_time_is_over_between_retries(sleeper: Process) -> None:
    """A server that answers with nothing but statuses to retry has not answered."""
    with answering(*[503] * 1000) as server:
        assert wait_for_answer(server.url, sleeper, 0.3, retry={503}) is None


def test_process_that_has_ended_is_not_asked() -> None:
    """Another process may listen on its port by then."""
    with answering() as server, running("exit 0") as process:
        process.wait()

        assert wait_for_answer(server.url, process, 10) is None
        assert server.asked == 0


def test_loopback_is_never_behind_a_proxy() -> None:
    """A proxy in the environment is for other machines."""
    code = "import sys; from app.host.http import LOOPBACK; print(LOOPBACK.open(sys.argv[1], timeout=5).status)"
    proxy = f"http://127.0.0.1:{free_port()}"
    environ = os.environ | dict.fromkeys(("http_proxy", "HTTP_PROXY", "all_proxy"), proxy) | {"no_proxy": "", "NO_PROXY": ""}
    with answering() as server:
        command = [sys.executable, "-c", code, server.url]
        output = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True).stdout

    assert output == "200\n"


def test_leader_may_end_by_itself(tmp_path: Path) -> None:
    """It gets SIGTERM and the time to clean up; its exit code is kept."""
    cleaned = tmp_path / "cleaned"
    with running(f"trap 'touch {cleaned}; exit 7' TERM; echo ready; while :; do sleep 0.05; done") as process:
        assert read_line(process) == "ready"
        end_group(process, 20)

        assert process.returncode == 7
        assert cleaned.exists()


def test_leader_that_ignores_the_signal_is_killed() -> None:
    with running("trap '' TERM; echo ready; while :; do sleep 0.05; done") as process:
        assert read_line(process) == "ready"
        start = time.monotonic()
        end_group(process, 0.3)

        assert process.returncode == -signal.SIGKILL
        assert time.monotonic() - start >= 0.3


@pytest.mark.parametrize(
    "leader",
    ["exec sleep 60", "trap '' TERM; while :; do sleep 0.05; done", "exit 0"],
    ids=["ends", "has to be killed", "has ended already"],
)
@pytest.mark.parametrize("child", ["exec sleep 60", "trap '' TERM; while :; do sleep 0.05; done"], ids=["mild", "stubborn"])
def test_what_the_leader_leaves_behind_is_killed(leader: str, child: str) -> None:
    """Children of the leader do not outlive it, whether or not they would end by themselves."""
    with running(f"({child}) >/dev/null & echo $!; {leader}") as process:
        left_behind = psutil.Process(int(read_line(process)))
        if leader == "exit 0":
            process.wait()
        assert not has_ended(left_behind)
        end_group(process, 0.3)

        assert process.returncode is not None
        wait_until_gone([left_behind])


def test_group_that_has_ended_may_be_ended_again() -> None:
    with running("exit 5") as process:
        process.wait()
        end_group(process, 1)
        kill_group(process)

        assert process.returncode == 5


def test_the_limit_of_open_files_is_raised_as_far_as_it_may() -> None:
    code = """
import resource
from app.host.processes import raise_file_limit
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
hard = min(hard, 2000)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
raise_file_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard))
"""
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert output == "True\n"


@pytest.mark.parametrize(
    ("files", "connections"), [(10**6, MAX_CONNECTIONS), (1024, 1024 - RESERVED_FILES), (RESERVED_FILES, 1), (3, 1)]
)
def test_connections_leave_files_for_the_worker_itself(files: int, connections: int) -> None:
    """The result is at least one and has an upper bound."""
    assert connections_within(files) == connections


def test_other_groups_are_not_killed(sleeper: Process) -> None:
    with running("exec sleep 60") as process:
        kill_group(process)

        assert process.returncode == -signal.SIGKILL
        assert sleeper.poll() is None
