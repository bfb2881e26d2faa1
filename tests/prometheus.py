"""Run Prometheus with the project's configuration, and query it."""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec

from bench.harness.ports import find_free
from bench.harness.processes import ROOT, running
from tests.processes import require_program

CONFIG = ROOT / "deploy" / "prometheus" / "prometheus.yml"
"""The project's configuration; its rules are in the same folder."""


class Prometheus(NamedTuple):
    url: str

    def has_values(self, expression: str, start: float, end: float, step: float) -> bool:
        """Return whether an expression has finite values over time: seconds since 1970, and seconds between two values."""
        found = self._get("query_range", query=expression, start=start, end=end, step=step)
        return any(math.isfinite(float(value)) for one in found["result"] for _, value in one["values"])

    def names(self) -> set[str]:
        return set(self._get("label/__name__/values"))

    def _get(self, path: str, **parameters: str | float) -> Any:  # noqa: ANN401 - depends on the path
        # Without certificates, which take longer to load than most queries.
        response = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=10, trust_env=False, verify=False)  # noqa: S501
        answer = response.json()
        assert answer["status"] == "success", answer
        return answer["data"]


@contextmanager
def running_prometheus(targets: Mapping[str, str], folder: Path, *, scrape_seconds: float) -> Iterator[Prometheus]:
    """Run Prometheus with the project's configuration until the block ends."""
    program = require_program("prometheus", "prometheus")
    (port,) = find_free(1)
    config = folder / "prometheus.yml"
    config.write_bytes(adapt(CONFIG.read_bytes(), targets, scrape_seconds))
    command = [
        program,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with running(command, {}, port, "/-/ready", folder / "prometheus.log") as server:
        yield Prometheus(server.url)


def adapt(config: bytes, targets: Mapping[str, str], scrape_seconds: float) -> bytes:
    """Change a configuration of Prometheus, as `running_prometheus` is told; return it as JSON, which is valid YAML."""
    changed = uncommented(config)
    interval = f"{scrape_seconds * 1000:.0f}ms"
    changed["global"] = {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval}
    changed["rule_files"] = [str(CONFIG.parent / name) for name in changed["rule_files"]]
    for job in changed["scrape_configs"]:
        job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
    return msgspec.json.encode(changed)


def uncommented(config: bytes) -> Any:  # noqa: ANN401 - what YAML contains
    """Decode a configuration whose job for Triton, a comment, becomes one."""
    return msgspec.yaml.decode(re.sub(rb"(?m)^  # (?=- job_name|  )", b"  ", config))
