"""Where Label Studio is, and what it is told by whom its images are fetched."""

from pathlib import Path

import pytest

from app.preflight import require_usable
from app.remote.address import TrustedOrigin, parse_origin
from app.settings.schema import Settings, SettingsError
from tests.support import REPOSITORY

URL = "http://label-studio:8080"


@pytest.fixture
def token(tmp_path: Path) -> str:
    file = tmp_path / "token"
    file.write_text("0123456789abcdef\n")
    return str(file)


def test_the_origin_gets_the_token(token: str) -> None:
    """Without a token, it is trusted all the same; without an address, nothing is."""
    assert parse_origin(URL, token) == TrustedOrigin(URL, "http", "label-studio", 8080, "Token 0123456789abcdef")
    assert parse_origin(URL) == TrustedOrigin(URL, "http", "label-studio", 8080)
    assert Settings().trusted_origin is None


@pytest.mark.parametrize(
    ("url", "content", "named"),
    [
        ("http://user:secret@label-studio:8080", "secret", "LABEL_STUDIO_URL: expected an http or https URL"),
        ("http://label-studio:x", None, "LABEL_STUDIO_URL: expected an http or https URL"),
        ("http://169.254.169.254", None, "LABEL_STUDIO_URL: expected an http or https URL"),
        (URL, "", "TOKEN_FILE: "),
        (URL, "two tokens", "TOKEN_FILE: "),
        (URL, "a\nb", "TOKEN_FILE: "),
        (URL, "\N{SNOWMAN}", "TOKEN_FILE: "),
        (URL, "missing", "TOKEN_FILE: "),
    ],
)
def test_the_start_fails_where_it_could_not_be_told(tmp_path: Path, url: str, content: str | None, named: str) -> None:
    """The message names the setting, and never repeats the token."""
    file = tmp_path / "token"
    if content not in {None, "missing"}:
        file.write_text(str(content), encoding="utf-8")
    settings = Settings(
        model_repository=str(REPOSITORY),
        label_studio_url=url,
        label_studio_token_file="" if content is None else str(file),
    )
    with pytest.raises(SettingsError) as caught:
        require_usable(settings)

    assert named in str(caught.value)
    assert "secret" not in str(caught.value)
