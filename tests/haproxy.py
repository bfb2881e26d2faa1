"""HAProxy with the file of `deploy/haproxy`, in front of two instances, in a folder and on a port of its own."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.harness.ports import find_free
from bench.harness.processes import running
from tests.programs import require_program
from tests.support import ROOT

SHIPPED = ROOT / "deploy" / "haproxy" / "haproxy.cfg"


@contextmanager
def proxying(sockets: Sequence[Path], folder: Path) -> Iterator[str]:
    """Run HAProxy without TLS until the block ends; yield its URL. It writes to `haproxy.log` in the folder."""
    program = require_program("haproxy", "haproxy")
    (port,) = find_free(1)
    text, count = re.subn(r"bind :443 ssl .*", f"bind 127.0.0.1:{port}", SHIPPED.read_text(encoding="utf-8"))
    assert count == 1
    for number, socket in enumerate(sockets, 1):
        shipped = f"unix@/run/nereid/nereid-{number}.sock"
        assert shipped in text
        text = text.replace(shipped, f"unix@{socket}")
    file = folder / "haproxy.cfg"
    file.write_text(text, encoding="utf-8")
    with running([program, "-db", "-f", str(file)], {}, port, "/readyz", folder / "haproxy.log") as server:
        yield server.url
