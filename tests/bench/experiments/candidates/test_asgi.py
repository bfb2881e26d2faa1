"""An ASGI application without a server, in a process of its own because it takes over the event loop until that ends."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from bench.experiments.candidates.asgi import AsgiRunner

async def application(scope, receive, send):
    message = await receive()
    if scope["type"] == "lifespan":
        print(message["type"])
        await send({"type": "lifespan.startup." + started})
        print((await receive())["type"])
        return
    headers = dict(scope["headers"])
    is_complete = int(headers[b"content-length"]) == len(message["body"]) > 100_000
    print(scope["method"], scope["path"], headers[b"content-type"].decode(), is_complete)
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b""})

started, status = sys.argv[1], int(sys.argv[2])
runner = AsgiRunner(application)
runner.send_request(None)
runner.send_request(None)
print("done")
"""


@pytest.mark.parametrize(("started", "status", "message"), [("failed", 200, "lifespan.startup.failed"), ("complete", 503, "503")])
def test_a_failure_of_the_application_is_an_error(started: str, status: int, message: str) -> None:
    """A start that fails, and a status other than 200, would otherwise be measured as if it were a detection."""
    command = [sys.executable, "-c", PROGRAM, started, str(status)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)

    assert ended.returncode == 1
    assert "RuntimeError" in ended.stderr
    assert message in ended.stderr
    assert "done" not in ended.stdout
