"""Latency through NGINX while the default version of a model is changed, relative to the time between changes."""

import argparse
import asyncio
import os
import re
import shutil
import subprocess
import sys
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TypeAlias

import numpy as np
import uvloop

from bench.experiments.options import Commands, add_shared, count
from bench.experiments.progress import say
from bench.harness.errors import ContestantError
from bench.harness.ports import find_free
from bench.harness.processes import ROOT, environment_of, running
from bench.harness.triton import link_installation
from bench.load.closed_loop import ClosedLoop
from bench.load.connection import Connection
from bench.load.driver import PATIENCE_SECONDS
from bench.load.images import unlabelled_samples
from bench.models.repository import write_fixture
from bench.report.text import number, table

MODEL = "wait_50_batch8"
"""It sleeps, so that a version that is being loaded takes no CPU time from it."""

_START_SECONDS, _FOLLOW_SECONDS = 90.0, 10.0
_PROXY = """daemon off; {user} pid {folder}/nginx.pid; error_log stderr;
events {{}}
http {{
    access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    upstream nereid {{ least_conn; {servers} keepalive 32; }}
    server {{
        listen 127.0.0.1:{port}; keepalive_requests 1000000; error_page 502 =503 /not-ready;
        location / {{ proxy_pass http://nereid; proxy_http_version 1.1; proxy_set_header Connection ""; }}
        location = /nginx {{ return 200; }}
        location = /not-ready {{ return 503; }}
    }}
}}
"""


Answers: TypeAlias = "list[tuple[float, str]]"
"""The latency of each in milliseconds, and its version; an error has none."""


class Clients(ClosedLoop):
    """Clients that ask until `seconds` is set, and keep all answers."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        super().__init__(url, unlabelled_samples(options.images), options.clients, inf, PATIENCE_SECONDS, None)
        self.answers: Answers = []

    def answered(self, number: int, since: float, status: str, body: bytes, timing: bytes) -> None:
        """Keep and count a response."""
        super().answered(number, since, status, body, timing)
        version = re.search(rb'"version":"(\d+)"', body) if status == "200" else None
        self.answers.append(((perf_counter() - since) * 1e3, version[1].decode() if version else ""))

    def lost(self, connection: Connection, number: int | None, since: float) -> None:
        """Keep and count a request without a response."""
        super().lost(connection, number, since)
        if number is not None and not self.is_over:
            self.answers.append(((perf_counter() - since) * 1e3, ""))


def run(options: argparse.Namespace) -> int:
    """Change the version again and again; print percentiles of the latency between and during changes."""
    if not (nginx := shutil.which("nginx")):
        raise ContestantError("NGINX is not installed")
    with TemporaryDirectory(prefix="nereid-bench-") as name:
        folder, (port,) = Path(name), find_free(1)
        (folder / "home").mkdir()
        link_installation(folder / "home")
        write_fixture(MODEL, folder / "models")
        _choose(folder / "models" / MODEL, 1)
        servers = " ".join(f"server unix:{folder}/run/nereid-{worker + 1}.sock max_fails=0;" for worker in range(options.workers))
        user = "" if os.geteuid() else "user root;"  # who owns the folder
        (folder / "nginx.conf").write_text(_PROXY.format(folder=folder, port=port, servers=servers, user=user), encoding="utf-8")
        given: dict[str, object] = {"socket": folder / "run", "triton_home": folder / "home", "model_repository": folder / "models"}
        given |= {"instances": options.workers, "workers": 1, "model": MODEL, "log_level": "warning"}
        environment = {f"NEREID_{key.upper()}": str(value) for key, value in given.items()}
        proxy, serve = [nginx, "-p", name, "-e", "stderr", "-c", f"{name}/nginx.conf"], [sys.executable, "-m", "app", "serve"]
        with (
            running(proxy, {}, port, "/nginx", folder / "nginx.log"),
            running(serve, environment, port, "/readyz", folder / "serve.log", ready_seconds=_START_SECONDS) as server,
        ):
            between, during, statuses = uvloop.run(
                _measure(f"{server.url}/detect", folder / "models" / MODEL, environment, options)
            )
    say()
    print(table([("ms", "p50", "p99", "max", "failed"), _row("between", between), _row("during", during)]))
    ratio = _percentiles(during)[1] / _percentiles(between)[1]
    print(f"p99 during / between {options.switches} changes: {ratio:.2f}; {MODEL}, {options.clients} clients; {statuses}")
    return 0


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("switch", help="p99 while the default version of a model is changed")
    command.add_argument("--switches", type=count, default=10, help="number of changes; the first half adds versions")
    add_shared(command, seconds=5.0, clients=16, workers=2, images=None)
    command.set_defaults(run=run)


async def _measure(
    url: str, model: Path, environment: dict[str, str], options: argparse.Namespace
) -> tuple[Answers, Answers, dict[str, int]]:
    """Return the answers between changes, those from the start of a change until all workers have followed it, and all statuses."""
    clients, half = Clients(url, options), (options.switches + 1) // 2
    load = asyncio.create_task(clients.measure(None))
    await asyncio.sleep(options.seconds)  # until the gateway knows the speed of the model
    between: Answers = []
    during: Answers = []
    for turn in range(options.switches):
        version = turn + 2 if turn < half else half + (turn - half) % 2
        say(f"version {version}")
        begin = len(clients.answers)
        await asyncio.sleep(options.seconds)
        between += clients.answers[begin:]
        begin = len(clients.answers)
        await asyncio.to_thread(_change, model, version, environment)
        until = perf_counter() + _FOLLOW_SECONDS
        while {answer[1] for answer in clients.answers[-2 * options.clients :]} != {str(version)}:
            if perf_counter() > until:
                raise ContestantError(f"version {version} does not answer")
            await asyncio.sleep(0.05)
        during += clients.answers[begin:]
    clients.seconds = 0.0
    return between, during, (await load).statuses


def _change(model: Path, version: int, environment: dict[str, str]) -> None:
    _choose(model, version)
    command, variables = [sys.executable, "-m", "app", "load", model.name], {**environment_of(ROOT), **environment}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ContestantError(done.stderr)


def _choose(model: Path, version: int) -> None:
    """Make a version the default one; a new one is a copy of the one before it, and only these two stay."""
    if not (model / str(version)).is_dir():
        shutil.copytree(model / str(version - 1), model / str(version))
        shutil.rmtree(model / str(version - 2), ignore_errors=True)
    config = (model / "config.pbtxt").read_text(encoding="utf-8").partition("version_policy")[0]
    default = f'parameters {{ key: "default_version" value {{ string_value: "{version}" }} }}'
    (model / "config.pbtxt").write_text(f"{config}version_policy {{ all {{}} }}\n{default}\n", encoding="utf-8")


def _row(name: str, answers: Answers) -> tuple[str, ...]:
    return name, *map(number, _percentiles(answers)), str(sum(not version for _, version in answers))


def _percentiles(answers: Answers) -> list[float]:
    return [float(value) for value in np.percentile([latency for latency, _ in answers], (50, 99, 100))]
