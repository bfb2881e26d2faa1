"""py-spy over one worker of Nereid under load."""

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import load, processes
from bench.processes import ContestantError
from bench.versus import Lineup, samples_of

_RATE = 200


def report(seconds: int, out: Path, name: str, clients: int, workers: int) -> int:
    """Write a flame graph of the busiest worker.

    Args:
        seconds: To record.
        out: SVG file.
        name: An entrant of `versus`.
        clients: That ask at the same time.
        workers: Processes of the server.
    """
    program = shutil.which("py-spy")
    if program is None:
        raise ContestantError("py-spy is not installed; run: ./just")
    samples = samples_of(None)
    with processes.triton(with_real=False) as triton, TemporaryDirectory(prefix="nereid-bench-") as logs:
        entrant = Lineup(triton, workers, Path(logs)).entrant(name, "null")
        with processes.started(entrant, Path(logs)) as server:
            url = f"{server.url}/detect"
            load.run(load.closed(url, samples, clients=clients, seconds=2))
            command = [program, "record", "--duration", str(seconds), "--rate", str(_RATE), "--nonblocking"]
            recorder = subprocess.Popen([*command, "--output", str(out.resolve()), "--pid", str(server.largest())])
            try:
                outcome = load.run(load.closed(url, samples, clients=clients, seconds=seconds + 1))
                code = recorder.wait(60)
            finally:
                recorder.kill()
    if code:
        print("py-spy failed; it has said why. Without root it needs kernel.yama.ptrace_scope = 0", file=sys.stderr)
        return 1
    print(f"{out}: one of {workers} workers of {name}, {outcome.rate:.0f} requests/s while it was watched")
    return 0
