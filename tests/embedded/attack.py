"""What a program on the same machine may try against Triton's controls: run as a program of its own, maybe as another user."""

import base64
import http.client
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

MODEL = "intruder"
REFUSED = "refused"
_SECRET = re.compile(rb"(?:nereid-[0-9]+-[0-9a-f]+-)?[0-9a-f]{32,}")
_TELLING = {"cmdline", "environ", "maps", "status"}

# A model that does nothing but leave a trace.
_CONFIG = json.dumps(
    {
        "name": MODEL,
        "backend": "python",
        "input": [{"name": "x", "data_type": "TYPE_UINT8", "dims": [1]}],
        "output": [{"name": "y", "data_type": "TYPE_UINT8", "dims": [1]}],
    }
)
_PROGRAM = """
import pathlib
pathlib.Path({marker!r}).touch()
class TritonPythonModel:
    def execute(self, requests):
        return []
"""
_HEADERS = (
    b"",
    b"nereid:\r\n",
    b"nereid: \r\n \r\n",
    b"nereid: \n\r\n",
    b"nereid:\r\n\t\r\n",
    b"nereid: \r\n \n\r\n",
    b"nereid: %0A\r\n",
    b"nereid: \\n\r\n",
    b"nereid: 0\r\nnereid: \r\n \r\n",
)
"""Ways to write a value that is, or may be taken for, a line feed."""


def attack(plan: dict[str, Any]) -> dict[str, str]:
    """Try everything.

    Args:
        plan: `http_port`, `grpc_port`, `marker` (a file that executed code creates), `victim` (a loaded model), `region` (a
            registered one), and `key`, with which gRPC refuses nothing; it may be empty.

    Returns:
        What became of each attempt.
    """
    outcomes = {}
    with grpc.insecure_channel(f"127.0.0.1:{plan['grpc_port']}") as channel:
        for name, call in _rpcs(GRPCInferenceServiceStub(channel), plan):
            for key in (plan["key"],) if plan["key"] else ("", "0", "0" * 64):
                outcomes[f"gRPC {name} with key {key!r}"] = _outcome_of(call, key)
    for method, path, body in _http_requests(plan):
        for header in _HEADERS:
            outcomes[f"{method} {path} {header!r}"] = _ask(plan["http_port"], method, path, body, header)
    return outcomes


def search(folder: int) -> list[str]:
    """Return what may be a key or the name of a region in all that /proc, /dev/shm, and a folder (its descriptor), show."""
    processes = [path for path in Path("/proc").iterdir() if path.name.isdigit()]  # some of which end meanwhile
    readable = [_read(process / name) for process in processes for name in _TELLING]
    readable += [os.fsencode(path.name) for path in Path("/dev/shm").iterdir()]  # noqa: S108
    for name in os.listdir(folder):
        with suppress(OSError), os.fdopen(os.open(name, os.O_RDONLY, dir_fd=folder), "rb") as file:
            readable.append(file.read())
    return sorted({secret.decode() for content in readable for secret in _SECRET.findall(content)})


def _rpcs(stub: Any, plan: dict[str, Any]) -> Iterator[tuple[str, Callable[..., Any]]]:  # noqa: ANN401
    """Make every RPC that changes the server, or tells what is needed for that."""
    mine = {"name": "intruder", "key": "/nereid-1-0123abcd", "byte_size": 16}
    level = messages.TraceSettingRequest.SettingValue(value=["TIMESTAMPS"])
    verbose = messages.LogSettingsRequest.SettingValue(uint32_param=1)
    requests = {
        "RepositoryModelLoad": [_load_request(plan)],
        "RepositoryModelUnload": [messages.RepositoryModelUnloadRequest(model_name=plan["victim"])],
        "RepositoryIndex": [messages.RepositoryIndexRequest()],
        "SystemSharedMemoryRegister": [messages.SystemSharedMemoryRegisterRequest(**mine)],
        "SystemSharedMemoryStatus": [messages.SystemSharedMemoryStatusRequest()],
        "SystemSharedMemoryUnregister": [
            messages.SystemSharedMemoryUnregisterRequest(name=plan["region"]),
            messages.SystemSharedMemoryUnregisterRequest(),  # all of them
        ],
        "CudaSharedMemoryStatus": [messages.CudaSharedMemoryStatusRequest()],
        "CudaSharedMemoryUnregister": [messages.CudaSharedMemoryUnregisterRequest()],
        "TraceSetting": [
            messages.TraceSettingRequest(),
            messages.TraceSettingRequest(settings={"trace_level": level}),
            messages.TraceSettingRequest(model_name=plan["victim"], settings={"trace_level": level}),
        ],
        "LogSettings": [messages.LogSettingsRequest(), messages.LogSettingsRequest(settings={"log_verbose_level": verbose})],
    }
    for name, calls in requests.items():
        for number, request in enumerate(calls):
            yield f"{name} {number}", partial(getattr(stub, name), request)


def _load_request(plan: dict[str, Any]) -> messages.RepositoryModelLoadRequest:
    request = messages.RepositoryModelLoadRequest(model_name=MODEL)
    request.parameters["config"].string_param = _CONFIG
    request.parameters["file:1/model.py"].bytes_param = _PROGRAM.format(marker=plan["marker"]).encode()
    return request


def _outcome_of(call: Callable[..., Any], key: str) -> str:
    try:
        answer = call(timeout=20, metadata=[("triton-grpc-protocol-nereid", key)] if key else [])
    except grpc.RpcError as error:
        return REFUSED if "protocol is restricted" in (error.details() or "") else f"{error.code()} {error.details()}"
    return f"answered: {answer}"


def _http_requests(plan: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    program = base64.b64encode(_PROGRAM.format(marker=plan["marker"]).encode()).decode()
    override = {"parameters": {"config": _CONFIG, "file:1/model.py": program}}
    register = {"key": "/nereid-1-0123abcd", "offset": 0, "byte_size": 16}
    yield "POST", f"/v2/repository/models/{MODEL}/load", json.dumps(override)
    yield "POST", f"/v2/repository/models/{plan['victim']}/unload", ""
    yield "POST", "/v2/repository/index", ""
    yield "POST", "/v2/systemsharedmemory/region/intruder/register", json.dumps(register)
    yield "GET", "/v2/systemsharedmemory/status", ""
    yield "GET", f"/v2/systemsharedmemory/region/{plan['region']}/status", ""
    yield "POST", f"/v2/systemsharedmemory/region/{plan['region']}/unregister", ""
    yield "POST", "/v2/systemsharedmemory/unregister", ""
    yield "GET", "/v2/cudasharedmemory/status", ""
    yield "POST", "/v2/cudasharedmemory/unregister", ""
    yield "GET", "/v2/trace/setting", ""
    yield "POST", "/v2/trace/setting", json.dumps({"trace_level": ["TIMESTAMPS"]})
    yield "POST", f"/v2/models/{plan['victim']}/trace/setting", json.dumps({"trace_level": ["TIMESTAMPS"]})
    yield "GET", "/v2/logging", ""
    yield "POST", "/v2/logging", json.dumps({"log_verbose_level": 1})


def _ask(port: int, method: str, path: str, body: str, header: bytes) -> str:
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\nConnection: close\r\n".encode()
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.sendall(head + header + b"\r\n" + body.encode())
        try:
            with http.client.HTTPResponse(connection) as answer:
                answer.begin()
                text = answer.read().decode()
        except (http.client.HTTPException, OSError) as error:
            # A request that Triton does not take for one is not answered.
            return REFUSED if header.strip() else f"no answer: {error!r}"
    return REFUSED if answer.status == http.client.FORBIDDEN and "API is restricted" in text else f"{answer.status} {text}"


def _read(path: Path) -> bytes:
    with suppress(OSError):
        return path.read_bytes()
    return b""


def main() -> None:
    """Do what the plan on stdin says, as this user and then as each that it names, and print what came of it.

    Another user may be unable to enter the folders of Python: what is imported lazily is there after the first time.
    """
    plan = json.load(sys.stdin)
    answers = []
    for user in (os.getuid(), *plan["users"]):
        if user != os.getuid():
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        answers.append({"outcomes": attack(plan), "secrets": search(plan["folder"])})
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
