"""A running service under load: the options for it, the limits of load on another host, and the question before that."""

import argparse
import socket
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit, urlunsplit

from bench.experiments.options import count
from bench.harness.errors import ContestantError
from bench.load.outcome import Outcome
from bench.load.target import Target, is_loopback, parse_target
from bench.report.records import Server, describe_server
from bench.report.text import responses

MAX_CONNECTIONS, MAX_RATE, MAX_SECONDS, MAX_REQUESTS = 256, 1000.0, 600.0, 100_000
"""The most that another host gets from one command: connections, requests per second, seconds and requests."""

WARM_UP_REQUESTS, _WARM_UP_SECONDS = 100, 1.0
_REFUSALS = {"400", "401", "403", "404", "405", "413", "415", "422"}
"""Statuses of requests that will not succeed later, either."""
_LIMITS = (
    f"Another host than this one is loaded only after a question, or with --yes, and gets at most {MAX_CONNECTIONS} connections, "
    f"{MAX_RATE:,.0f} requests per second (of a constant rate), {MAX_SECONDS:,.0f} seconds and {MAX_REQUESTS:,} requests."
)


class Plan(NamedTuple):
    """The load of one command, at most."""

    connections: int
    seconds: float
    """Time of sending in each run."""
    runs: int = 1
    rate: float | None = None
    """Requests per second, if they do not depend on responses."""

    @property
    def total_seconds(self) -> float:
        """Time of sending in all runs, and before the first one."""
        return self.runs * self.seconds + _WARM_UP_SECONDS


class Service(NamedTuple):
    """A service that may be loaded."""

    target: Target
    server: Server
    is_elsewhere: bool
    """Whether its host is not a loopback address."""
    requests: int | None
    """Maximum number of requests in each run; None for no limit."""


def add_service(command: argparse.ArgumentParser, path: str) -> None:
    """Add the options of `reach`, and `--image`; `path` says what the path of the URL means."""
    command.add_argument("--url", default="http://127.0.0.1:4603", help=f"http or https URL of the server; {path}")
    command.add_argument("--key-file", type=Path, metavar="FILE", help="file with the API key")
    command.add_argument("--ca", type=Path, metavar="FILE", help="PEM file of the CAs to trust, instead of the system's")
    command.add_argument("--yes", action="store_true", help="load another host without a question")
    command.add_argument("--requests", type=count, help="maximum number of requests per run")
    command.add_argument(
        "--image", type=Path, metavar="FILE|DIR", help="images to send; by default 24 images, 320 pixels to 12 megapixels"
    )
    command.epilog = _LIMITS


def reach(options: argparse.Namespace, url: str, plan: Plan) -> Service:
    """Return the service at a URL, for the load of a plan; on another host, only if the user agrees.

    Raises:
        ContestantError: The key or the host does not exist, the plan is above a limit, or the user does not agree.
        ValueError: As for `parse_target`.
    """
    target = parse_target(url, read_key(options.key_file) if options.key_file else "", options.ca)
    try:
        address = str(socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ContestantError(f"{target.host}: {error.strerror}") from error
    server = describe_server(target.authority, address)
    if is_loopback(target.host):
        return Service(target, server, is_elsewhere=False, requests=options.requests)
    requests = min(options.requests or MAX_REQUESTS, (MAX_REQUESTS - WARM_UP_REQUESTS) // plan.runs)
    for name, value, limit in (
        ("connections", plan.connections, MAX_CONNECTIONS),
        ("requests per second", plan.rate or 0, MAX_RATE),
        ("seconds", plan.total_seconds, MAX_SECONDS),
    ):
        if value > limit:
            raise ContestantError(f"another host gets at most {limit:,.0f} {name}, not {value:,.0f}")
    if not options.yes:
        _ask(target, address, plan, requests)
    # Connect to the address in the question, whatever the name stands for later.
    return Service(target._replace(host=address), server, is_elsewhere=True, requests=requests)


def read_key(path: Path) -> str:
    """Return the API key in a file; raise ContestantError if it does not contain one key, and nothing else."""
    try:
        words = path.read_text(encoding="ascii").split()
    except OSError as error:
        raise ContestantError(f"the key file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        words = []
    if len(words) != 1:
        raise ContestantError(f"the key file {path} does not contain one API key, and nothing else")
    return words[0]


def with_route(url: str, route: str) -> str:
    """Add a route to a URL without a path, or whose path ends in `/`; another path is a route itself."""
    parts = urlsplit(url)
    return url if parts.path and not parts.path.endswith("/") else urlunsplit(parts._replace(path=f"{parts.path or '/'}{route}"))


def check_warm_up(url: str, outcome: Outcome) -> None:
    """Raise ContestantError if a service speaks no HTTP/1.1, redirects, or refuses the key, the path or the images."""
    if redirects := [status for status in outcome.statuses if status.startswith("3")]:
        raise ContestantError(f"{url} answers with a redirect ({', '.join(redirects)}); give the URL to which it leads")
    if {*outcome.statuses} <= {"error"}:
        raise ContestantError(f"{url} does not answer in HTTP/1.1 with a Content-Length")
    if not {*outcome.statuses} & {"200", "wrong"} and any(status in _REFUSALS for status in outcome.statuses):
        raise ContestantError(f"{url} accepts no request: {responses(outcome)}")


@contextmanager
def one_line(url: str) -> Iterator[None]:
    """Report errors that the caller can correct in one line."""
    try:
        yield
    except ConnectionRefusedError as error:
        hint = "; start one: ./just serve" if is_loopback(urlsplit(url).hostname or "") else ""
        raise ContestantError(f"no server listens at {url}{hint}") from error
    except ssl.SSLCertVerificationError as error:
        raise ContestantError(f"the certificate of {url} is not valid: {error.verify_message}; --ca names another CA") from error
    except ssl.SSLError as error:
        hint = ": it does not speak HTTP/1.1" if "application protocol" in str(error).replace("_", " ").lower() else ""
        raise ContestantError(f"no TLS connection to {url}{hint}: {error.strerror}") from error
    except ValueError as error:
        raise ContestantError(str(error)) from error
    except OSError as error:
        raise ContestantError(f"{error.filename or url}: {error.strerror or error}") from error


def _ask(target: Target, address: str, plan: Plan, requests: int) -> None:
    """Raise ContestantError unless the user agrees to a load."""
    if not sys.stdin.isatty():
        raise ContestantError(f"nothing is sent to {target.authority} without --yes: there is no terminal to ask at")
    tls = "with" if target.tls else "WITHOUT"
    rate = f"{plan.rate:g} requests/s over " if plan.rate else ""
    load = f"{rate}up to {plan.connections} connections for {plan.total_seconds:g} s"
    total = plan.runs * requests + WARM_UP_REQUESTS
    question = f"Load {target.authority} ({address}) {tls} TLS: {load}, at most {total:,} requests? [y/N] "
    print(question, end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise ContestantError("nothing is sent")
