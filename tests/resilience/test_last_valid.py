"""What processes use of a file that has become invalid."""

import subprocess
import sys

import pytest

from app.resilience import last_valid
from tests.support import ROOT

# A parent that reads a valid file. Its workers, one after the other, find it invalid, changed, and invalid again; the last one is
# another program.
PARENT = """
import os, subprocess, sys
from app.resilience import last_valid
def read(number):
    def read_or_fail():
        if number is None:
            raise ValueError("torn")
        return [number]
    return last_valid.load("api_keys", "keys.toml", read_or_fail, list[int], ValueError)
def tell(number):
    print(read(number), last_valid.refused, flush=True)
if len(sys.argv) > 1:
    tell(None)
    sys.exit()
descriptor = last_valid.create()
tell(1)
for number in (None, 2, None):
    if os.fork() == 0:
        tell(number)
        os._exit(0)
    os.wait()
subprocess.run([sys.executable, "-c", os.environ["PROGRAM"], "heir"], pass_fds=[descriptor], check=True)
"""


def test_new_processes_use_what_another_one_has_read() -> None:
    """A worker by fork, and the API that is started again; what was read last counts, whoever has read it."""
    environ = {"PYTHONPATH": str(ROOT), "PROGRAM": PARENT}
    output = subprocess.run([sys.executable, "-c", PARENT], env=environ, capture_output=True, text=True, check=True).stdout
    told = [line for line in output.splitlines() if line.startswith("[")]

    refused = "{'api_keys': 'torn'}"
    assert told == ["[1] {}", f"[1] {refused}", "[2] {}", f"[2] {refused}", f"[2] {refused}"]


def test_file_that_was_never_valid_is_an_error_and_shorter_contents_replace_longer_ones() -> None:
    def load(source: str, text: bytes) -> str:
        return last_valid.load("triton_tls", source, lambda: str(text, "ascii"), str, UnicodeDecodeError)

    for text in (b"long " * 1000, b"short"):
        assert load("a", text) == str(text, "ascii")
        with pytest.raises(UnicodeDecodeError):
            load("b", b"\xff")

    assert load("a", b"\xff") == "short"
