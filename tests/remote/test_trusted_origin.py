"""Addresses of the one origin that a setting names, Label Studio's, as far as they are judged without the network."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import UrlNotAllowed
from app.preflight import require_usable
from app.remote.address import TrustedOrigin, parse_origin
from app.settings.schema import Settings, SettingsError
from tests.support import REPOSITORY

URL = "http://label-studio:8080"
ORIGIN = parse_origin(URL)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://label-studio:8080", ("http://label-studio:8080", "http", "label-studio", 8080)),
        ("HTTP://Label-Studio./ls/", ("http://label-studio/ls", "http", "label-studio", 80)),
        ("https://ls.example.org", ("https://ls.example.org", "https", "ls.example.org", 443)),
        ("http://192.168.1.5:8080/", ("http://192.168.1.5:8080", "http", "192.168.1.5", 8080)),
        ("http://[::1]:8080", ("http://[::1]:8080", "http", "::1", 8080)),
    ],
)
def test_an_origin_is_scheme_host_and_port(url: str, expected: tuple[str, str, str, int]) -> None:
    """The port is that of the scheme unless there is another one; a path is where relative addresses begin."""
    assert parse_origin(url) == TrustedOrigin(*expected)


URLS = """
label-studio:8080 ftp://label-studio http://user:canary@label-studio http://label-studio:0 http://label-studio:70000 http://127.1
http://2130706433 http://169.254.169.254 http://[fe80::1] http://[fe80::1%25eth0] http://[::ffff:10.0.0.1] http://
"""
OTHERS = """
http://label-studio/x http://label-studio:8081/x https://label-studio:8080/x http://label-studio.example.org:8080/x
http://label-studio:8080.example.org/x http://x.label-studio:8080/x http://127.0.0.1:8080/x s3://label-studio:8080/x
"""


@pytest.mark.parametrize("url", URLS.split())
def test_anything_else_is_no_origin(url: str) -> None:
    """IP addresses that cannot be connected to are no origins either."""
    with pytest.raises(UrlNotAllowed, match="expected an http or https URL") as raised:
        parse_origin(url)
    assert "canary" not in raised.value.detail


@pytest.mark.parametrize("url", OTHERS.split())
def test_other_origins_are_not_trusted(url: str) -> None:
    try:
        assert ORIGIN.parse(url) is None
    except UrlNotAllowed as error:
        assert "only https" in error.detail  # noqa: PT017 - both are right


@given(
    st.one_of(st.text(), st.text(alphabet="ah.:/@[]%?#\\0*1").map("/{}".format), st.text().map("http://label-studio:8080{}".format))
)
def test_any_text_is_of_the_origin_or_not(text: str) -> None:
    """What is trusted leads to its host and port by its scheme, and to no other; what begins with `/` always does."""
    try:
        image = ORIGIN.parse(text)
    except UrlNotAllowed:
        return
    assert image is not None or not text.strip().startswith("/")
    if image is not None:
        assert (image.url.scheme, image.url.raw_host, image.url.port, image.url.userinfo) == ("http", b"label-studio", 8080, b"")
        assert (image.name, image.port, image.origin) == ("label-studio", 8080, ORIGIN)
        assert image.url.raw_path.startswith(b"/")


def test_the_origin_gets_the_token(tmp_path: Path) -> None:
    """Without a token, it is trusted all the same; without an address, nothing is."""
    (tmp_path / "token").write_text("0123456789abcdef\n")

    assert parse_origin(URL, str(tmp_path / "token")) == ORIGIN._replace(authorization="Token 0123456789abcdef")
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
        (URL, "eyJhbGciOiJIUzI1NiJ9.e30.secret", "there is no legacy token in it"),
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
