"""The models of the embedded Triton that runs on this machine: load them through its private socket, and measure them."""

import re
from collections import Counter
from contextlib import suppress
from pathlib import Path

from app.embedded.folder import Device, TritonFolder
from app.errors import GatewayError, UnknownModel
from app.host.program import CommandError, NotPossible
from app.model.reference import split_reference
from app.model.spec import ModelSpec, from_triton_config
from app.settings.schema import PREFIX, Settings
from app.triton import credentials
from app.triton.blocking_client import BlockingClient
from app.triton.config_file import ConfigFileError, read_config_file
from app.triton.repository import LOCK, config_path, identify
from app.triton.status import NoReply, Unreachable, own_message

_LOAD_SECONDS = 120.0
_PSS = re.compile(r"^Pss: +([0-9]+) kB", re.MULTILINE)
"""A process's part of its memory, some of which it may share with others."""


def find_obstacle(settings: Settings) -> str:
    """Tell why models cannot be loaded now, to end a sentence; empty if they can. Raises CommandError as `TritonFolder.check`."""
    if settings.triton_endpoints:
        tritons = "a Triton" if settings.triton_loads_models else f"the Triton at {settings.triton_endpoints}"
        return f"when {tritons} has loaded the change"
    if settings.triton_ports:
        return f"when Triton starts again: {PREFIX}TRITON_PORTS lets it load nothing meanwhile"
    folder = TritonFolder(settings)
    folder.check()
    return "" if folder.socket.exists() else f"when Triton starts with {settings.model_repository}; none runs yet"


def apply(settings: Settings, model: str, *, loads: bool = True) -> str:
    """Load a model that was added or changed, or unload one; return as `find_obstacle`, or raise CommandError if Triton cannot."""
    folder, target = TritonFolder(settings), Path(settings.model_repository).resolve() / model
    if obstacle := find_obstacle(settings):
        if not loads:
            raise NotPossible(f"{model} cannot be unloaded: a Triton that runs elsewhere, or not at all, is not told")
        if settings.triton_endpoints and settings.triton_loads_models:
            _announce(target.parent)
        return obstacle
    client, link = BlockingClient(f"unix:{folder.socket}"), folder.path / "models" / model
    try:
        folder.drop_removed_models()
        if loads and target.is_dir():
            with suppress(FileExistsError):
                link.symlink_to(target)
            identity = identify(target)
            client.ask("RepositoryModelLoad", _LOAD_SECONDS, model_name=model)
            folder.note_loaded(model, identity)
        else:
            client.ask("RepositoryModelUnload", _LOAD_SECONDS, model_name=model)
    except Unreachable:
        return f"when Triton starts with {settings.model_repository}; none runs yet"
    except NoReply as error:
        raise CommandError(
            f"Triton has not loaded {model} within two minutes; its log is {settings.triton_home}/triton.log"
        ) from error
    except GatewayError as error:
        raise CommandError(f"Triton cannot load {model}: {own_message(error)}") from error
    except OSError as error:  # Triton is being stopped
        raise CommandError(f"Triton cannot load {model}: {error}") from error
    _announce(target.parent)
    return ""


def read_usage(settings: Settings) -> dict[str, str]:
    """Return memory and speed of each model that the embedded Triton runs, as far as they are known."""
    folder = TritonFolder(settings)
    folder.check()
    if settings.triton_endpoints or not folder.socket.exists():
        return {}
    kibibytes, prefix = Counter[str](), f"{folder.path}/models/"
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):  # another user's, or ended meanwhile
            path = (process / "cmdline").read_text(encoding="utf-8", errors="replace").split("\0")[1]
            if path.startswith(prefix) and (found := _PSS.search((process / "smaps_rollup").read_text(encoding="ascii"))):
                kibibytes[path.removeprefix(prefix).partition("/")[0]] += int(found[1])
    texts = {model: f", {count / 1024:.0f} MiB" for model, count in kibibytes.items()}
    with suppress(GatewayError):
        for model, milliseconds in BlockingClient(f"unix:{folder.socket}").read_speeds().items():
            texts[model] = f"{texts.get(model, '')}, {milliseconds:.1f} ms a batch"
    device = folder.device or Device()
    return {model: f"{text} on {device.gpu or 'the CPU'} ({device.provider})" for model, text in texts.items()}


def read_spec(settings: Settings, model: str) -> ModelSpec | None:
    """Return the spec of a model, by reference, None without such a model; raise CommandError if it cannot be used or asked for."""
    name, version = split_reference(model)
    folder = Path(settings.model_repository, name)
    try:
        if (path := config_path(folder, is_embedded=not settings.triton_endpoints)).is_file() and (folder / version).is_dir():
            return from_triton_config({**read_config_file(path), "name": name}, version)
        tls = credentials.load(settings.triton_tls_folder)
        return BlockingClient(settings.triton_address, tls).read_spec(model) if settings.triton_endpoints else None
    except UnknownModel:
        return None
    except (GatewayError, ConfigFileError) as error:
        raise CommandError(f"{model}: {own_message(error) if isinstance(error, GatewayError) else error}") from error


def _announce(repository: Path) -> None:
    # The API's workers look every second.
    with suppress(OSError):  # the file may be another user's
        (repository / LOCK).touch()
