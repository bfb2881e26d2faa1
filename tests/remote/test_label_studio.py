"""What Label Studio is told by whom its images are fetched."""

from pathlib import Path

import pytest

from app.config import Settings, SettingsError
from app.preflight import require_usable
from app.remote.label_studio import authorization
from tests.support import REPOSITORY

URL = "https://Label-Studio.example.org/ls"


@pytest.fixture
def token(tmp_path: Path) -> str:
    file = tmp_path / "token"
    file.write_text("0123456789abcdef\n")
    return str(file)


def test_a_host_gets_the_token(token: str) -> None:
    """By its name and port, whatever the path; without a token, or an address, none does."""
    hosts = ["*.example.org", "*.example.org:8443"]

    assert authorization(URL, token, hosts) == {("label-studio.example.org", 443): "Token 0123456789abcdef"}
    assert list(authorization("https://a.example.org:8443", token, hosts)) == [("a.example.org", 8443)]
    assert authorization(URL, "", hosts) == authorization("", "", []) == {}


@pytest.mark.parametrize(
    ("url", "hosts", "content", "named"),
    [
        ("", "*", "secret", "TOKEN_FILE: it needs"),
        (URL, "", "secret", "LABEL_STUDIO_URL: images are not fetched from this host"),
        (URL, "images.example.org", None, "LABEL_STUDIO_URL: images are not fetched from this host"),
        ("https://user:secret@a.example.org", "*", "secret", "LABEL_STUDIO_URL: the address of an image must not"),
        (URL, "*", "", "TOKEN_FILE: "),
        (URL, "*", "two tokens", "TOKEN_FILE: "),
        (URL, "*", "a\nb", "TOKEN_FILE: "),
        (URL, "*", "\N{SNOWMAN}", "TOKEN_FILE: "),
        (URL, "*", "missing", "TOKEN_FILE: "),
    ],
)
def test_the_start_fails_where_it_could_not_be_told(tmp_path: Path, url: str, hosts: str, content: str | None, named: str) -> None:
    """The message names the setting, and never repeats the token."""
    file = tmp_path / "token"
    if content not in {None, "missing"}:
        file.write_text(str(content), encoding="utf-8")
    settings = Settings(
        model_repository=str(REPOSITORY),
        url_hosts=hosts,
        label_studio_url=url,
        label_studio_token_file="" if content is None else str(file),
    )
    with pytest.raises(SettingsError) as caught:
        require_usable(settings)

    assert named in str(caught.value)
    assert "secret" not in str(caught.value)
