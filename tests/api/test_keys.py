"""API keys: who may use which route, what the log says of the caller, and the file of keys; and what pages of other origins may."""

import hashlib
import hmac
from collections.abc import AsyncIterator, Sequence
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.api.admin import ROUTES
from app.api.admission import middleware
from app.api.answering import problems
from app.api.application import Application
from app.api.caller import keys
from app.api.caller.client_address import client_address
from app.api.caller.keys import ApiKeys, KeysError
from app.api.dialects.dialect import load
from app.api.pass_on import ask_search
from app.api.reports.instead import instead
from app.api.routes import VERSION
from app.api.routing import ADMIN_ROUTES
from app.main import create_app
from app.resilience import last_valid
from app.resilience.fairness import HIGH, LOW, NORMAL, Caller
from app.settings.schema import DIALECTS
from tests.api.conftest import ADMIN, CAMERA, client_for, routes_of, settings_for, write_keys
from tests.fakes.triton import FakeTriton, serving
from tests.support import SCENE, call, calling, captured_log, chunk, json, lifespan_of, receiving, started

SECRET = "a-secret-that-must-not-be-shown"  # noqa: S105 - it protects nothing
DETECT, HEALTH = f"camera.{SECRET}", "monitor.other"
POSTED = [
    *(f"/{task}{rest}" for task in ("detect", "segment", "pose", "obb", "analyze") for rest in ("", "/batch")),
    *("/classify", "/predict/tiny", "/ocr/predict", "/ocr/batch", "/faces/detect", "/faces/recognize", "/faces/verify"),
    *("/embed/image", "/embed/batch", "/embed/boxes", "/embed/text"),
]
NEED_DETECT = [prefix + path for prefix in ("", VERSION) for path in (*POSTED, "/models", "/models/tiny", "/routes")]
NEED_ADMIN = [prefix + path for route in [*ROUTES, *ADMIN_ROUTES] for path in route.paths for prefix in ("", VERSION)]
NEED_HEALTH = [prefix + path for prefix in ("", VERSION) for path in ("/health", "/metrics", "/ready")]
NEED_NONE = [
    *(version + path for version in ("", "/v1") for path in ("/live", "/livez", "/livez/triton", "/readyz")),
    *("/", "/v1", "/page-assets/page.css", "/v1/page-assets/page.css"),
    *("/docs", "/docs/openapi.json", "/docs-assets/swagger_style.css"),
]
NOT_OFFERED = [prefix + path for path in sorted(instead.paths | ask_search.paths) for prefix in ("", VERSION)]
OPEN = {
    *(f"/deepstack/v1/{path}status/{action}" for path in ("", "server/") for action in ("ping", "updateavailable")),
    *(f"/deepstack/v1/vision/face/{action}" for action in ("register", "recognize", "list", "delete")),  # not there yet
    *(f"/roboflow/clip/{action}" for action in ("embed_text", "compare")),  # not there
    *(f"/{dialect}/health/{state}" for dialect in ("nim/v1", "kserve/v2") for state in ("live", "ready")),
}


@pytest.fixture(scope="module")
async def locked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Application]:
    """The real application with two keys, one for each scope."""
    file = write_keys(tmp_path_factory.mktemp("keys"), ("camera", SECRET, "detect"), ("monitor", "other", "health"))
    settings = {"api_keys_file": file, "dialects": ",".join(DIALECTS), "faces": True}
    async with serving(fake := FakeTriton()), lifespan_of(made := create_app(settings_for(fake.url, **settings))):
        yield made


async def ask(app: Application, path: str, headers: dict[str, str] | Sequence[tuple[str, str]] = ()) -> httpx.Response:
    async with calling(app) as client:
        is_post = path.partition("?")[0].removeprefix(VERSION) in POSTED
        return await client.request("POST" if is_post else "GET", path, headers=headers, content=SCENE if is_post else None)


async def test_key_opens_the_routes_of_its_scope_and_no_others(locked: Application) -> None:
    for name, value in (("authorization", "bearer  {}"), ("X-API-Key", "{}")):
        for path in NEED_DETECT:  # 400: no classifier; 404: not listed; 502: Triton answers nothing
            assert (await ask(locked, path, {name: value.format(DETECT)})).status_code in {200, 400, 404, 415, 502}
        for path in NEED_HEALTH:
            assert (await ask(locked, path, {name: value.format(HEALTH)})).status_code == 200
    for key, paths in ((DETECT, NEED_HEALTH), (HEALTH, NEED_DETECT)):
        for path in paths:
            assert json(await ask(locked, path, {"X-API-Key": key}), 403)["code"] == "forbidden"
            assert "send one API key" in json(response := await ask(locked, path), 401)["detail"]
            assert response.headers["www-authenticate"] == "Bearer"


async def test_probes_documentation_and_what_is_not_offered_need_no_key(locked: Application) -> None:
    """A probe has no secret, and the documentation tells how to send one."""
    for path in NEED_NONE:
        assert (await ask(locked, path)).status_code == 200, path
    for path in NOT_OFFERED:
        if path != "/predict":  # it is Ultralytics', unless it has JSON
            assert json(await ask(locked, path), 404)["code"] == "not_offered"


async def test_every_other_route_needs_a_key(locked: Application) -> None:
    """A route that is added later must not be open by mistake."""
    others = ("/docs", "/page-assets", "/v1/page-assets", *(f"/{name}/" for name in DIALECTS))
    paths = {path.replace("tiny", "{model:str}") for path in NEED_DETECT + NEED_ADMIN + NEED_HEALTH + NEED_NONE + NOT_OFFERED}
    found = {route.path for route in routes_of(locked)}
    assert {path for path in found if not path.startswith(others)} == {path for path in paths if not path.startswith(others)}


async def test_every_route_of_a_dialect_needs_a_key(locked: Application) -> None:
    async with calling(locked) as client:
        for dialect in load(DIALECTS):
            for handler in dialect.handlers:
                for path in handler.paths:
                    sample = f"/{dialect.name}{path}".replace("{version:int}", "1").replace("{model:str}", "tiny")
                    for method in handler.http_methods - {"OPTIONS"}:
                        response = await client.request(method, sample.replace("{name:str}", "tiny"), json={"image": "AAAA"})

                        assert (response.status_code in {400, 401}) == (sample not in OPEN), (method, sample, response.text)


async def test_wrong_malformed_and_repeated_keys_are_unauthorized(locked: Application, monkeypatch: pytest.MonkeyPatch) -> None:
    log = captured_log(monkeypatch, middleware)
    key, bearer = ("X-API-Key", DETECT), ("Authorization", f"Bearer {DETECT}")
    for headers in (
        *([("X-API-Key", wrong)] for wrong in ("", "camera.wrong", f"monitor.{SECRET}", f"Bearer {DETECT}", DETECT + "\xff")),
        *([("Authorization", wrong)] for wrong in (DETECT, "Bearer", f"Basic {DETECT}", f"Bearer {DETECT}, Bearer {DETECT}")),
        *([key, key], [key, bearer], [bearer, bearer]),
    ):
        reply = await call(locked, receiving(chunk(b"x")), "/detect", headers)

        assert (reply.status, reply.problem["code"], reply.headers["www-authenticate"]) == (401, "unauthorized", "Bearer")
        assert "key" not in log[-1].kwargs


async def test_log_has_the_id_of_the_key_and_never_its_secret(locked: Application, monkeypatch: pytest.MonkeyPatch) -> None:
    log = captured_log(monkeypatch, middleware)
    others = [captured_log(monkeypatch, module) for module in (problems, last_valid)]
    answers = [
        await ask(locked, path, headers)
        for path in ("/detect", "/detect?camera=1", "/health")
        for headers in ({"X-API-Key": DETECT}, {"Authorization": f"Bearer {DETECT}"}, {"X-API-Key": f"nobody.{SECRET}"})
    ]

    assert [line.kwargs.get("key") for line in log] == ["camera", "camera", None] * 3
    assert SECRET not in repr([log, *others])
    assert not [answer for answer in answers if SECRET in answer.text or SECRET in repr(answer.headers)]


PROXIES = (ip_network("10.0.0.0/8"), ip_network("2001:db8::/32"))


def test_trusted_proxy_names_the_client() -> None:
    rows: list[tuple[Any, str | None, str]] = [
        *((peer, "192.0.2.7", "192.0.2.7") for peer in (("", "0"), None, ("::ffff:10.1.2.3", 1))),  # the first of a unix socket
        # A peer that is not trusted cannot name another client.
        *(((peer, 1), "192.0.2.7", "192.0.2.1") for peer in ("192.0.2.1", "::ffff:192.0.2.1")),
        # Without an address the connection counts.
        *((("10.1.2.3", 1), named, "10.1.2.3") for named in (None, "192.0.2.7, 10.0.0.1", "\xe4")),
    ]
    for peer, named, address in rows:
        headers = [] if named is None else [(b"x-real-ip", named.encode("latin-1"))]
        assert client_address({"client": peer, "headers": headers}, dict(headers), PROXIES) == address  # type: ignore[typeddict-item]


def test_client_is_the_last_address_that_proxies_name_and_that_is_none() -> None:
    one, other = (b"x-forwarded-for", b"192.0.2.66, 192.0.2.7"), (b"x-forwarded-for", b"10.0.0.9")
    element = b'for=192.0.2.66;proto=https, For="[2001:db9::7]:4711";by=10.0.0.1, for=10.0.0.9'
    for headers, address in (
        ([one, other], "192.0.2.7"),
        ([(b"x-forwarded-for", b"192.0.2.7:80")], "192.0.2.7"),
        ([(b"x-forwarded-for", b"nonsense, 10.0.0.9")], "10.0.0.9"),
        ([(b"x-forwarded-for", b"192.0.2.7, unknown")], "10.1.2.3"),
        ([(b"forwarded", element)], "2001:db9::7"),
        ([(b"forwarded", b'for=192.0.2.7;host="x,for=192.0.2.66"')], "192.0.2.7"),
        ([(b"forwarded", b'for="192.0.2.66, for="[2001:db9::7]"')], "10.1.2.3"),  # its client has sent an open quote
        ([(b"forwarded", element), one, (b"x-real-ip", b"192.0.2.8")], "192.0.2.8"),
    ):
        for peer, expected in ((("10.1.2.3", 1), address), (("192.0.2.1", 1), "192.0.2.1")):
            assert client_address({"client": peer, "headers": headers}, dict(headers), PROXIES) == expected  # type: ignore[typeddict-item]


SHA256 = hashlib.sha256(SECRET.encode()).hexdigest()
OTHER = hashlib.sha256(b"other").hexdigest()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def table(id_: str = "camera-1", sha256: str = f'["{SHA256}"]', scopes: str = '["detect"]', more: str = "") -> str:
    return f"[{id_}]\nsha256 = {sha256}\nscopes = {scopes}\n{more}\n"


def found(known: ApiKeys, credential: str) -> str | None:
    key = known.find(credential.encode())
    return key and key.id


def test_file_is_read_by_id(path: Path) -> None:
    b_2 = table("b_2", f'["{OTHER.upper()}", "{SHA256}"]', '["health", "detect"]')
    text = table(more='share = 0.25\npriority = "low"') + b_2 + table("c", more='priority = "high"')
    path.write_text(text, encoding="utf-8-sig")  # some editors write a byte order mark
    read = keys.load(path)

    assert {id_: (key.id, set(key.scopes), key.caller, key.caller.priority) for id_, key in read.items()} == {
        "camera-1": ("camera-1", {"detect"}, Caller("camera-1", 0.25, has_share=True, priority=LOW), LOW),
        "b_2": ("b_2", {"detect", "health"}, Caller("b_2", 0.75), NORMAL),
        "c": ("c", {"detect"}, Caller("c", 0.75, priority=HIGH), HIGH),
    }
    assert [digest.hex() for digest in read["b_2"].digests] == [OTHER, SHA256]


async def test_priority_of_a_key_is_that_of_its_images_in_the_queue_of_triton(path: Path) -> None:
    path.write_text("".join(table(name, more=f'priority = "{name}"') for name in ("high", "normal", "low")))  # noqa: ASYNC240 - a small file
    fake = FakeTriton().find_nothing()
    fake.config = {**fake.config, "dynamic_batching": {"priority_levels": 2, "default_priority_level": 2}}
    priorities = {}
    async with client_for(fake, api_keys_file=str(path)) as client:
        for name in ("high", "normal", "low"):
            json(await client.post("/detect", content=SCENE, headers={"X-API-Key": f"{name}.{SECRET}"}))
            priorities[name] = fake.requests[-1].parameters["priority"].uint64_param

    assert priorities == {"high": 1, "normal": 0, "low": 2}  # 0: that of the model


TABLE_RULE = ": [camera-1]: expected sha256 ("


def test_file_that_is_not_valid_is_rejected(path: Path) -> None:
    with pytest.raises(KeysError, match=f"^{path}: No such file or directory$"):
        keys.load(path)
    for text, message in (
        # With a file that an editor or a full disk has truncated, everybody would be refused.
        ("# the keys of the cameras\n", " has no key"),
        *((table(sha256=digests), TABLE_RULE) for digests in ("[]", f"{[SHA256] * 3}", f'["{SECRET}"]')),
        (table(scopes=f'["{SECRET}"]'), TABLE_RULE),
        *(
            (table(more=more), TABLE_RULE)
            for more in ("share = nan", f'priority = "{SECRET}"', f'{SECRET} = "x"', 'tenant = "a b"')
        ),
        (table(f"camera-1.{SECRET}"), TABLE_RULE),
        (table(f'"camera-1.{SECRET}"'), ": a key's id has 1 to 64 letters, digits, '_' or '-'"),
        (f"[a.{SECRET}]\n[a.{SECRET}]\n", " is not valid TOML: at line 2, column 35"),
        ("\udcff", " is not valid TOML: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (table("a", more="share = 0.5") + table("b", more="share = 0.5"), ": the shares of all keys add up to 1 or more"),
    ):
        path.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(KeysError) as caught:
            keys.load(path)
        assert str(caught.value).startswith(f"{path}{message}")
        assert SECRET not in str(caught.value)
        assert caught.value.__cause__ is None


def test_credential_finds_its_key_after_two_comparisons(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of comparisons, each in constant time, does not tell which ids exist or how many secrets they have."""
    compared: list[int] = []
    compare = hmac.compare_digest

    def counting(given: bytes, known: bytes) -> bool:
        compared.append(len(known))
        return compare(given, known)

    path.write_text(table("a") + table("b", f'["{OTHER}"]') + table("c", f'["{OTHER}", "{SHA256}"]'))
    known = ApiKeys(path)
    monkeypatch.setattr(hmac, "compare_digest", counting)
    wrong = ("", ".", "a", "a.", SECRET, f".{SECRET}", f"b.{SECRET}", f"a.{SECRET}x", f"a.{SHA256}", f"d.{SECRET}", "ä.ö")
    valid = {f"a.{SECRET}": "a", "b.other": "b", f"c.{SECRET}": "c", "c.other": "c"}  # of which one replaces the other
    for credential, id_ in (valid | dict.fromkeys(wrong)).items():
        compared.clear()
        assert (found(known, credential), compared) == (id_, [32, 32]), credential


ORIGIN = "https://app.example.org"


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A page of one of two origins that an application with keys allows; its Triton finds nothing."""
    fake, origins = FakeTriton().find_nothing(), f"http://localhost:3000, {ORIGIN.upper()}"
    file = write_keys(tmp_path, ("boss", "secret", "admin"), ("camera", "secret", "detect"))
    async with client_for(fake, api_keys_file=file, cors_origins=origins, max_file_size_mb=1) as client:
        client.headers["Origin"] = ORIGIN
        yield client


async def preflight(client: httpx.AsyncClient, method: str, path: str, origin: str = ORIGIN) -> httpx.Response:
    return await client.options(path, headers={"Origin": origin, "Access-Control-Request-Method": method})


def of_cors(response: httpx.Response) -> list[str]:
    return [name for name in response.headers if name.startswith("access-control-")]


async def test_preflight_request_needs_no_key(page: httpx.AsyncClient) -> None:
    """The browser sends none with it; also for unknown paths, so that the page can read the 404."""
    for path in ("/v1/predict/tiny?confidence=0.5", "/" + "x" * 2000):
        response = await preflight(page, "POST", path)
        assert (response.status_code, response.content) == (204, b"")
        assert int(response.headers["access-control-max-age"]) > 0
        names = ("allow-origin", "allow-methods", "allow-headers", "allow-credentials")
        allowed = [ORIGIN, "GET, HEAD, POST", "*, Authorization", None]
        assert [response.headers.get(f"access-control-{name}") for name in names] == allowed
        assert "Origin" in response.headers.get_list("vary")


async def test_no_page_of_another_origin_changes_models(page: httpx.AsyncClient) -> None:
    for method, path in (("POST", "/v1/models/doors"), ("DELETE", "/models/doors"), ("PUT", "/routes/a")):
        asked = await preflight(page, method, path)
        response = await page.request(method, path, headers=ADMIN)
        assert (asked.status_code, response.status_code) == (204, 403)
        assert of_cors(asked) == of_cors(response) == []


async def test_pages_of_other_origins_read_nothing(page: httpx.AsyncClient) -> None:
    for origin in (f"{ORIGIN}:8443", f"{ORIGIN}.example.com", ORIGIN.replace("https", "http"), "null"):
        headers = {**CAMERA, "Origin": origin}
        for response in (await preflight(page, "POST", "/detect", origin), await page.get("/models", headers=headers)):
            assert of_cors(response) == []
            assert "Origin" in response.headers.get_list("vary")


async def test_page_reads_responses_and_errors(page: httpx.AsyncClient) -> None:
    for method, path, headers, content, status in (
        ("POST", "/detect", CAMERA, SCENE, 200),
        ("POST", "/v1/vision/detection", {}, SCENE, 401),
        ("POST", "/detect", CAMERA, bytes(2**20 + 1), 413),
        ("POST", "/" + "x" * 2000, {}, b"", 400),
    ):
        response = await page.request(method, path, headers=headers, content=content)
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == ORIGIN
        exposed = "Retry-After, Server-Timing, X-Cache, X-Process-Time, X-Request-ID"
        assert response.headers["access-control-expose-headers"] == exposed
        assert "Origin" in response.headers.get_list("vary")
    assert (await page.get("/")).headers.get_list("vary") == ["Accept", "Origin"]


async def test_every_page_can_be_allowed_and_none_is_by_default(reader: httpx.AsyncClient) -> None:
    async with started(create_app(settings_for("127.0.0.1:1", cors_origins="*"))) as client:
        for response in (await preflight(client, "POST", "/detect"), await client.get("/livez", headers={"Origin": "null"})):
            assert response.headers["access-control-allow-origin"] == "*"
            assert "vary" not in response.headers
    asked = await preflight(reader, "POST", "/detect")
    for response in (asked, await reader.get("/livez", headers={"Origin": ORIGIN})):
        assert of_cors(response) == []
        assert "vary" not in response.headers
    assert asked.headers["allow"] == "OPTIONS, POST"
