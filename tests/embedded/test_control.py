"""Changed models are loaded into the embedded Triton, if it runs and anybody may do so."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from tritonclient.grpc import service_pb2 as messages

from app.embedded.control import apply
from app.embedded.folder import TritonFolder
from app.host.program import CommandError
from app.settings.schema import TRITON_SOCKET, Settings
from app.triton.repository import DESCRIPTION, identify, last_change
from tests.fakes import http
from tests.fakes.triton import FakeTriton, serving


class LoadingTriton(FakeTriton):
    """Notes which models it is to load or unload."""

    refusal_to_load = ""
    """Its message, if it cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[tuple[str, str]] = []
        self.changed_meanwhile: Path | None = None
        """A file that is changed while a model is loaded."""

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        self.loads.append(("load", request.model_name))
        if self.changed_meanwhile:
            self.changed_meanwhile.touch()
        if self.refusal_to_load:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.refusal_to_load)
        return messages.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, request: Any, _: Any) -> Any:  # noqa: ANN401, N802
        self.loads.append(("unload", request.model_name))
        return messages.RepositoryModelUnloadResponse()


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    """A repository with the model `doors`, and a Triton's folder that is as Triton has left it."""
    (tmp_path / "repository" / "doors").mkdir(parents=True)
    made = Settings(model_repository=str(tmp_path / "repository"), triton_home=str(tmp_path))
    made.triton_folder.mkdir(mode=0o700)
    (made.triton_folder / "models").mkdir()
    yield made
    shutil.rmtree(made.triton_folder)


@pytest.fixture
async def triton(settings: Settings) -> AsyncIterator[LoadingTriton]:
    async with serving(fake := LoadingTriton(), address=settings.triton_address):
        yield fake


def changed(settings: Settings) -> int:
    return last_change(Path(settings.model_repository))


async def test_model_is_loaded_again_whenever_it_is_changed(settings: Settings, triton: LoadingTriton) -> None:
    link, before = settings.triton_folder / "models" / "doors", 0
    for loads in ("load", "load", "unload"):
        if loads == "unload":
            link.resolve().rmdir()
        assert await asyncio.to_thread(apply, settings, "doors") == ""
        assert triton.loads.pop() == (loads, "doors")
        assert link.is_symlink() is (loads == "load")
        assert changed(settings) > before
        before = changed(settings)


async def test_files_that_triton_has_loaded_are_known_unless_they_change_meanwhile(
    settings: Settings, triton: LoadingTriton
) -> None:
    doors, folder = Path(settings.model_repository, "doors"), TritonFolder(settings)
    (doors / "1").mkdir()
    (doors / DESCRIPTION).touch()
    for content in (b"one", b"two"):
        (doors / "1" / "model.onnx").write_bytes(content)
        assert not folder.has_loaded("doors", identify(doors))
        triton.refusal_to_load = "load failed for model 'doors': version 1: out of luck;\nand so on"
        before = changed(settings)
        with pytest.raises(CommandError, match=r"^Triton cannot load doors: load failed for .*: version 1: out of luck;$"):
            await asyncio.to_thread(apply, settings, "doors")
        assert (folder.has_loaded("doors", identify(doors)), changed(settings)) == (False, before)
        triton.refusal_to_load = ""
        await asyncio.to_thread(apply, settings, "doors")
        assert folder.has_loaded("doors", identify(doors))
    triton.changed_meanwhile = doors / "1" / "model.onnx"
    await asyncio.to_thread(apply, settings, "doors")
    assert not folder.has_loaded("doors", identify(doors))


@pytest.mark.parametrize(
    ("others", "obstacle"),
    [
        ({"triton_endpoints": "127.0.0.1:1"}, "when the Triton at 127.0.0.1:1 has loaded the change"),
        ({"triton_ports": 5001}, "when Triton starts again: NEREID_TRITON_PORTS lets it load nothing meanwhile"),
    ],
)
async def test_no_other_triton_is_told(settings: Settings, triton: LoadingTriton, others: dict[str, Any], obstacle: str) -> None:
    """One with TCP ports loads models at its start only."""
    assert await asyncio.to_thread(apply, msgspec.structs.replace(settings, **others), "doors") == obstacle
    assert (triton.loads, changed(settings)) == ([], 0)


def test_triton_that_does_not_run_loads_the_model_when_it_starts(settings: Settings) -> None:
    """One that was killed has left its socket behind. A folder that others may enter is not trusted."""
    for _ in range(2):
        assert apply(settings, "doors") == f"when Triton starts with {settings.model_repository}; none runs yet"
        if not (settings.triton_folder / TRITON_SOCKET).exists():
            http.listening_on(settings.triton_folder / TRITON_SOCKET).close()
    settings.triton_folder.chmod(0o755)
    with pytest.raises(CommandError, match="is not a folder of mode 700"):
        apply(settings, "doors")
