"""The files for NGINX, as texts and as NGINX checks them: they fit the gateway; what they do is in `test_nginx.py`."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import server
from app.api.admin import MAX_MODEL_BYTES, ROUTES
from app.api.context import PAUSE_SECONDS
from app.api.dialects.kserve import control
from app.api.receiving.client_watch import body_too_large
from app.api.reports.health import livez, readyz
from app.api.reports.models import model, models
from app.api.routes import VERSION, ModelRoute
from app.api.routing import ADMIN_ROUTES, routes
from app.api.search import routes as search
from app.errors import BodyTooLarge, MalformedRequest
from app.settings.schema import DIALECTS, Settings
from tests.deploy.paths import PATHS
from tests.nginx import SHIPPED, prepare

INSTANCES = 3
CONTROL = {prefix + path for path in control.paths for prefix in ("", "/kserve")}
SLASHED = CONTROL | {f"{path}/" for path in CONTROL}
TEXT = (SHIPPED / "nereid.conf").read_text(encoding="utf-8")


def value_of(directive: str, text: str = TEXT) -> str:
    (value,) = re.findall(rf"^ {{4}}{directive} ([^;]+);", text, re.MULTILINE)
    return str(value)


def seconds(directive: str, text: str = TEXT) -> float:
    return float(value_of(directive, text).removesuffix("s"))


def test_the_limits_are_those_of_the_gateway() -> None:
    settings = Settings()

    limits = re.findall(r"client_max_body_size (\S+);", TEXT)
    assert limits == [f"{size:g}m" for size in (settings.max_file_size_mb, settings.max_batch_size_mb, MAX_MODEL_BYTES >> 20)]
    assert '413 "the limit is $nereid_body_limit";' in TEXT
    for nbytes in (settings.max_body_bytes, settings.max_batch_bytes, MAX_MODEL_BYTES):
        assert f' "{body_too_large(nbytes).detail.removeprefix("the limit is ")}";' in TEXT
    assert seconds("client_body_timeout") == PAUSE_SECONDS
    assert seconds("proxy_read_timeout") > settings.max_timeout_seconds > settings.timeout_seconds


def test_the_gateways_own_errors_have_the_same_names() -> None:
    for error in (BodyTooLarge, MalformedRequest):
        assert f"    {error.status} {error.code};\n" in TEXT
        assert f'    {error.status} "{error.title}";\n' in TEXT


def test_each_path_of_the_table_is_public_with_its_limit() -> None:
    patterns = re.findall(r"location ~ (.+?) \{\n", TEXT)
    own, several, records, changes, dialects = patterns[:5]
    for path, (handler, *_) in PATHS:
        sample = re.sub(r"\{\w+:str\}", "tiny", path.replace("{version:int}", "3"))
        location = next((pattern for pattern in (own, several, records, dialects) if re.search(pattern, sample)), None)

        assert (location is None) == (sample in {"/health", "/v1/auth"} or bool(re.search(changes, sample)))
        assert (location == several) == (isinstance(handler, ModelRoute) and handler.takes == "images") or sample == "/predict"
    for name in DIALECTS:
        assert re.search(dialects, f"/{name}/anything")


def test_models_are_changed_at_the_location_that_only_this_machine_has() -> None:
    """Also below a dialect's name, whose location takes everything else: the first location that matches counts."""
    patterns = re.findall(r"location ~ (.+?) \{\n", TEXT)
    (changes,) = re.findall(r"location ~ (.+?) \{\n(?:(?!    \}\n).+\n)*? +limit_except", TEXT)

    for path in {prefix + path for prefix in ("", VERSION) for route in ROUTES for path in route.paths} | SLASHED:
        sample = re.sub(r"\{\w+:str\}", "tiny", path)
        assert next(pattern for pattern in patterns if re.search(pattern, sample)) == changes


EXAMPLES = {"[^/]+": "tiny", "[0-9]+": "3", "(page-assets/tiny)?": "", "/?$": "$", "^/v1/vision/": "^/v1/vision/detection$"}
OTHERS = {
    prefix + re.sub(r"\{\w+:str\}", "tiny", path)
    for handler in (models, model, routes, livez, readyz, *ROUTES, *ADMIN_ROUTES, *search.ROUTES)
    for path in handler.paths
    for prefix in ("", VERSION)
}
"""Paths at which no model is asked."""


@pytest.mark.parametrize("location", re.findall(r"location ~ (.+?) \{\n", TEXT))
@given(data=st.data())
def test_each_public_path_exists(location: str, data: st.DataObject) -> None:
    for general, example in EXAMPLES.items():
        location = location.replace(general, example)
    path = data.draw(st.from_regex(location, fullmatch=True)).rstrip()
    paths = {path for path, _ in PATHS} | CONTROL
    known = {re.sub(r"\{\w+:str\}", "tiny", path.replace("{version:int}", "3")) for path in paths}

    assert path in known | OTHERS | {"/", f"{VERSION}/"} | {f"/{name}/" for name in DIALECTS}


def test_instances_are_listed_in_two_ways() -> None:
    listed = [(SHIPPED / name).read_text(encoding="utf-8") for name in ("upstream.conf", "upstream.compose.conf")]
    sockets, addresses = (re.findall(r"    server (\S+) max_fails=0;\n", text) for text in listed)
    same = [re.sub(r" *#.*| +server .*", "", text) for text in listed]

    assert sockets == [f"unix:/run/nereid/nereid-{number}.sock" for number in (1, 2, 3)]
    assert addresses == [f"api-{number}:{Settings().port}" for number in (1, 2, 3)]
    assert same[0].split() == same[1].split()
    assert re.findall(r"proxy_next_upstream_tries (\d+);", TEXT) == [str(INSTANCES + 1), str(INSTANCES)]


def test_nginx_closes_idle_connections_before_the_gateway_does() -> None:
    """Otherwise NGINX could send a request on a connection that the gateway is closing."""
    text = (SHIPPED / "upstream.conf").read_text(encoding="utf-8")

    assert seconds("keepalive_timeout", text) * 1000 < server._HEADER_MILLISECONDS  # noqa: SLF001


@pytest.mark.system
@pytest.mark.parametrize(
    "servers", [["unix:/run/nereid-1.sock"] * INSTANCES, ["127.0.0.1:1"] * INSTANCES], ids=["sockets", "ports"]
)
def test_nginx_accepts_the_files(tmp_path: Path, servers: list[str]) -> None:
    """Without a complaint; from 1.25.1 on it prefers another way to write `http2`."""
    said = prepare(servers, tmp_path).check().splitlines()

    assert [line for line in said if "[" in line and "http2" not in line] == []
