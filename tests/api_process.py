"""The server of the API in processes of its own, as a user runs it."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil

from app.host.processes import SUPERVISED, kill_group
from app.triton.shared_memory import sweep
from tests.fakes.triton import FakeTriton
from tests.processes import PATIENCE_SECONDS, has_ended
from tests.support import REPOSITORY, ROOT, SCENE, until

FOREVER = 600
"""Seconds; longer than any test takes."""

_ANNOUNCEMENTS = "nereid: listening at ", "nereid: ready: "


class Api:
    """An API that runs in processes of its own and listens on a unix socket."""

    def __init__(self, triton_address: str, folder: Path, patch: str = "", **settings: object) -> None:
        """Start it in a folder with its socket and its log, after it has run `patch`; settings are what is not as usual here."""
        self.socket = folder / "api.sock"
        self.log = folder / "api.log"
        given = {
            "socket": self.socket,
            "triton_endpoints": triton_address,
            "model": "tiny",
            "model_repository": REPOSITORY,
            "workers": 1,
            "timeout_seconds": FOREVER,
            **settings,
        }
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"import sys\n{patch}\nfrom app.__main__ import main\nsys.exit(main())", "api"],
                cwd=ROOT,
                env={**os.environ, **{f"NEREID_{name.upper()}": str(value) for name, value in given.items()}},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[int(os.environ[SUPERVISED])] if SUPERVISED in os.environ else [],
            )
        # Each request has a connection of its own, so that none is sent to a worker that has stopped meanwhile.
        transport = httpx.AsyncHTTPTransport(uds=str(self.socket), limits=httpx.Limits(max_keepalive_connections=0))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://nereid", timeout=PATIENCE_SECONDS)

    async def status(self, path: str) -> int | None:
        """Return the status of a path; None if there is no answer."""
        try:
            return (await self.client.get(path)).status_code
        except httpx.HTTPError:
            return None

    async def answers(self, path: str, status: int | None) -> bool:
        return await self.status(path) == status

    async def detect(self) -> httpx.Response:
        return await self.client.post("/detect", content=SCENE)

    def workers(self) -> list[psutil.Process]:
        return [child for child in psutil.Process(self.process.pid).children() if not has_ended(child)]

    async def is_refused(self) -> bool:
        return await self.answers("/livez", None)

    async def has_noted(self, signals: int) -> bool:
        """Return whether so many signals have been noted by a patch."""
        noted = self.socket.with_name("api.sock.signals")
        return noted.exists() and noted.stat().st_size >= signals

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self.process.wait, PATIENCE_SECONDS)

    @property
    def messages(self) -> list[str]:
        """What it has said, without the log and where it listens."""
        return [line for line in self._lines if not line.startswith(("{", *_ANNOUNCEMENTS))]

    @property
    def announcements(self) -> list[str]:
        return [line for line in self._lines if line.startswith(_ANNOUNCEMENTS)]

    @property
    def _lines(self) -> list[str]:
        return self.log.read_text(encoding="utf-8").splitlines()


@asynccontextmanager
async def running(
    fake: FakeTriton, folder: Path, patch: str = "", has_begun: Callable[[], bool] | None = None, **settings: object
) -> AsyncIterator[Api]:
    """Run an API, which answers unless only something else is waited for, until the block ends, however it ends."""
    api = Api(fake.url, folder, patch, **settings)

    async def answers() -> bool:
        assert api.process.poll() is None, api.log.read_text(encoding="utf-8")
        return has_begun() if has_begun else await api.answers("/livez", 200)

    try:
        await until(answers)
        yield api
    finally:
        fake.may_answer.set()
        await api.client.aclose()
        kill_group(api.process)
        sweep()  # as the next worker would
