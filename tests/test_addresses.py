"""Where the API listens, and where it can be reached."""

from pathlib import Path

import pytest

from app.addresses import local_url, sockets
from app.config import Settings


def test_one_instance_listens_on_host_and_port_or_on_its_socket(tmp_path: Path) -> None:
    """None stands for host and port."""
    assert sockets(Settings()) == [None]
    assert sockets(Settings(socket=str(tmp_path / "api.sock"))) == [tmp_path / "api.sock"]


def test_several_instances_have_numbered_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is resolved, because instances are told the path."""
    monkeypatch.chdir(tmp_path)

    found = sockets(Settings(instances=2, socket_folder="run"))

    assert found == [tmp_path / "run" / "nereid-1.sock", tmp_path / "run" / "nereid-2.sock"]


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:4603"),
        ("0.0.0.0", "http://127.0.0.1:4603"),  # noqa: S104 - nobody listens
        ("::", "http://[::1]:4603"),
        ("fd00::1", "http://[fd00::1]:4603"),
        ("gateway", "http://gateway:4603"),
    ],
)
def test_local_url_names_an_address_that_can_be_connected_to(host: str, url: str) -> None:
    """A wildcard address can be listened on but not connected to."""
    assert local_url(Settings(host=host)) == url
