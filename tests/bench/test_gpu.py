"""`bench gpu`, rehearsed: a bundle on a host without a network, on which the CPU stands in for CUDA, and GPUs for models."""

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from bench.__main__ import main
from bench.experiments.gpu import Found, take
from bench.harness.lineup import NEREID
from bench.harness.processes import ROOT
from bench.report.gpu import load_gpu_record
from bench.report.records import read_commit

RESULT = ROOT / "bench" / "results" / "simulated_gpu.json"
LIMITS = 'ulimit -n 1024 && ip link set lo up && exec timeout 540 sh "$@"'


@pytest.mark.skipif(
    subprocess.run(["unshare", "--net", "ip", "link"], check=False, capture_output=True).returncode != 0,
    reason="a network of its own needs root and iproute2",
)
@pytest.mark.timeout(1200)  # it downloads what a host needs, about 600 MB
def test_bundle_measures_every_part_on_a_host_without_a_network(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    assert main(["gpu", "--pack", str(folder)]) == 0
    parts = {file.name: file.stat().st_size for file in folder.iterdir()}
    assert max(parts.values()) <= 64 << 20
    assert {"run", "SHA256SUMS", "part-00"} <= parts.keys()

    options = ["--rehearse", "--seconds", "0.3", "--clients", "1", "4", "--workers", "1"]
    host = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    subprocess.run(["unshare", "--net", "sh", "-c", LIMITS, "sh", folder / "run", *options], env=host, check=True)
    record = load_gpu_record(folder / "gpu.json")
    assert (record.gpu, record.commit, record.failures) == ("simulated GPU", read_commit(), {})
    assert {*record.limits} == {"onnxruntime", "triton"}
    assert record.f1 is not None
    assert record.f1 > 0.9
    loads = [(run.contestant, run.clients) for run in record.runs]
    assert loads == [(name, clients) for name in NEREID for clients in (1, 4, None)]
    assert all(run.outcome.correct and "wrong" not in run.outcome.statuses for run in record.runs)


def test_parts_after_one_that_hangs_or_fails_are_measured() -> None:
    parts = {"hangs": (time.sleep, 600), "fails": (int, "x"), "dies": (os._exit, 3), "works": (Found,)}

    found = dict(take(parts, budget=60, limit=5))
    assert found["hangs"] == "no result in time"
    assert "invalid literal" in str(found["fails"])
    assert found["dies"] == "no result; the process has ended with code 3"
    assert found["works"] == Found()


@pytest.mark.parametrize("changed", [{"f1": 1.1}, {"limits": {"triton": 0}}, {"gpu": ""}, {"more": 1}])
def test_record_with_an_impossible_value_is_refused(changed: dict[str, object], tmp_path: Path) -> None:
    assert main(["gpu", "--check", str(RESULT)]) == 0
    file = tmp_path / "changed.json"
    file.write_bytes(msgspec.json.encode(msgspec.json.decode(RESULT.read_bytes()) | changed))

    assert main(["gpu", "--check", str(file)]) == 1
