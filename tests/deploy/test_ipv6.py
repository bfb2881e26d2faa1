"""A pod of a cluster with IPv6 only: its kubelet, and NGINX, reach the gateway with the setting of the images."""

import asyncio
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from subprocess import Popen

import httpx
import pytest

from bench.harness.processes import environment_of
from tests.fakes.triton import FakeTriton, serving
from tests.networks import NEEDS_NETWORKS, enter, ip, network
from tests.nginx import prepare
from tests.processes import nothing_left_running  # noqa: F401 - a fixture
from tests.sockets import NEEDS_IPV6, short_tmp_path  # noqa: F401 - a fixture
from tests.support import REPOSITORY, ROOT


@pytest.mark.system
@NEEDS_IPV6
@NEEDS_NETWORKS
async def test_gateway_and_nginx_are_reached_by_ipv6_alone(tmp_path: Path) -> None:
    (host,) = re.findall(r"NEREID_HOST=(\S+)", (ROOT / "Containerfile").read_text(encoding="utf-8"))
    given = {"HOST": host, "MODEL": "tiny", "MODEL_REPOSITORY": str(REPOSITORY), "TRITON_ENDPOINTS": f"unix:{tmp_path}/triton"}
    environment = environment_of(ROOT) | {f"NEREID_{name}": value for name, value in given.items()}
    proxy = prepare(["[fd00::7]:4603"], tmp_path)
    urls = "http://[fd00::7]:4603/readyz", "http://127.0.0.1:4603/livez", proxy.url.replace("127.0.0.1", "[::1]") + "/readyz"

    def answers(url: str) -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(url, verify=False).is_success  # noqa: S501 - the certificate has no address of this network
        return False

    async with serving(FakeTriton().find_nothing(), address=given["TRITON_ENDPOINTS"]):
        with network(f"nereid-{os.getpid()}") as pod, ExitStack() as stack:
            ip("-n", pod, "address", "add", "fd00::7/64", "dev", "lo", "nodad")
            for command in ([sys.executable, "-m", "app", "api"], proxy.command):
                process = stack.enter_context(Popen(["ip", "netns", "exec", pod, *command], env=environment))  # noqa: ASYNC220
                stack.callback(process.terminate)
            inside = stack.enter_context(ThreadPoolExecutor(1, initializer=enter, initargs=(pod,)))
            ask = asyncio.get_running_loop().run_in_executor
            while not all([await ask(inside, answers, url) for url in urls]):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.1)
