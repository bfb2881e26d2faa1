"""Load changed models into the embedded Triton that runs on this machine, through its private socket."""

from pathlib import Path

from app.embedded.folder import TritonFolder, check_private
from app.errors import GatewayError, TritonUnavailable
from app.host.program import CommandError
from app.settings.schema import Settings
from app.triton.blocking_client import BlockingClient
from app.triton.repository import LOCK
from app.triton.status import NoReply, own_message


def apply(settings: Settings, model: str) -> bool:
    """Load a model that was added or changed, or unload one that was removed; return False if no such Triton runs.

    Raises:
        CommandError: Triton cannot load it.
    """
    folder = TritonFolder(settings)
    if settings.triton_endpoints or settings.triton_ports or not folder.socket.exists():
        return False
    check_private(folder.path)
    for link in [link for link in (folder.path / "models").iterdir() if not link.exists()]:
        link.unlink()  # with a link to nothing, Triton cannot list its models
    client, link = BlockingClient(f"unix:{folder.socket}"), folder.path / "models" / model
    target = Path(settings.model_repository).resolve() / model
    try:
        if target.is_dir():
            if not link.is_symlink():
                link.symlink_to(target)
            client.load(model)
        else:
            client.unload(model)
    except NoReply as error:
        raise CommandError(f"Triton is still loading {model}; its log is {settings.triton_home}/triton.log") from error
    except TritonUnavailable:
        return False
    except GatewayError as error:
        raise CommandError(f"Triton cannot load {model}: {own_message(error)}") from error
    (target.parent / LOCK).touch()  # the API's workers look at it every second
    return True
