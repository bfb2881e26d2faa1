"""NGINX with the files of `deploy/nginx`, in a folder and on ports of its own."""

import json
import os
import re
import ssl
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import trustme

from bench.harness.ports import find_free
from bench.harness.processes import running
from tests.processes import require_program
from tests.sockets import HAS_IPV6
from tests.support import ROOT

SHIPPED = ROOT / "deploy" / "nginx"

_HTTP = """
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/upstream.conf;
    include {folder}/nereid.conf;
"""


class Proxy(NamedTuple):
    url: str
    """The public listener, with TLS."""
    local_url: str
    """The listener for the same machine."""
    plain_url: str
    trust: ssl.SSLContext
    folder: Path

    @property
    def command(self) -> list[str]:
        program = require_program("nginx", "nginx")
        return [program, "-p", str(self.folder), "-e", str(self.folder / "error.log"), "-c", str(self.folder / "nginx.conf")]

    def check(self) -> str:
        """Let NGINX check its configuration, which must be valid; return what it says."""
        done = subprocess.run([*self.command, "-t"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def log_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "access.log").read_text(encoding="utf-8").splitlines()]


def prepare(servers: Sequence[str], folder: Path, changes: Mapping[str, str] | None = None) -> Proxy:
    """Put the shipped files into a folder, for servers at `host:port` or `unix:/path`, with ports and other texts of their own."""
    tls, local, plain = find_free(3)
    trust = write_certificate(folder, "localhost", "127.0.0.1")
    own = {
        "listen 80 ": f"listen 127.0.0.1:{plain} ",
        "listen 443 ": f"listen 127.0.0.1:{tls} ",
        "listen [::]:80 ": f"{'' if HAS_IPV6 else '# '}listen [::1]:{plain} ",
        "listen [::]:443 ": f"{'' if HAS_IPV6 else '# '}listen [::1]:{tls} ",
        "4603": str(local),
        "/etc/nereid/tls/": f"{folder}/",
        "/var/log/nginx/": f"{folder}/",
        **(changes or {}),
    }
    (folder / "nereid.conf").write_text(_changed("nereid.conf", own), encoding="utf-8")
    own = {
        "user www-data;": "user root;" if os.geteuid() == 0 else "",  # who owns the folder
        "events {": f"daemon off;\npid {folder}/nginx.pid;\nevents {{",
        "/var/log/nginx/": f"{folder}/",
        "    include /etc/nginx/conf.d/*.conf;\n": _HTTP.format(folder=folder),
    }
    (folder / "nginx.conf").write_text(_changed("nginx.conf", own), encoding="utf-8")

    is_local = servers[0].startswith("unix:")
    text = (SHIPPED / ("upstream.conf" if is_local else "upstream.compose.conf")).read_text(encoding="utf-8")
    lines = "".join(f"    server {server} max_fails=0;\n" for server in servers)
    text, count = re.subn(r"(    server \S+ max_fails=0;\n)+", lambda _: lines, text)
    assert count == 1
    run = Path(servers[0].removeprefix("unix:")).parents[1] if is_local else Path("/run")
    (folder / "upstream.conf").write_text(text.replace("/run/nereid-next/", f"{run}/nereid-next/"), encoding="utf-8")
    return Proxy(f"https://127.0.0.1:{tls}", f"http://127.0.0.1:{local}", f"http://127.0.0.1:{plain}", trust, folder)


def write_certificate(folder: Path, *names: str) -> ssl.SSLContext:
    """Write `tls.crt` for host names or addresses, with `tls.key` and its `ca.crt`, into a folder; return what trusts it."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.crt")
    certificate = authority.issue_cert(*names)
    for number, blob in enumerate(certificate.cert_chain_pems):
        blob.write_to_path(folder / "tls.crt", append=number > 0)
    certificate.private_key_pem.write_to_path(folder / "tls.key")
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    return trust


def _changed(name: str, changes: Mapping[str, str]) -> str:
    text = (SHIPPED / name).read_text(encoding="utf-8")
    assert all(shipped in text for shipped in changes)
    # At once: a port that replaces another may contain what is still to be replaced.
    return re.sub("|".join(map(re.escape, changes)), lambda match: changes[match[0]], text)


@contextmanager
def proxying(servers: Sequence[str], folder: Path, changes: Mapping[str, str] | None = None) -> Iterator[Proxy]:
    """Run NGINX in front of instances until the block ends; the arguments are those of `prepare`."""
    proxy = prepare(servers, folder, changes)
    port = int(proxy.local_url.rpartition(":")[2])
    with running(proxy.command, {}, port, "/readyz", folder / "nginx.log"):
        yield proxy
