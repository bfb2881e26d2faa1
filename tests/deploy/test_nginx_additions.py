"""What NGINX has for containers and for pages of other origins; with one instance, which returns the same for each GET."""

from collections.abc import Iterator

import httpx
import pytest

from bench.harness.ports import find_free
from bench.harness.processes import running
from tests.fakes.http import answering
from tests.nginx import SHIPPED, Proxy, prepare

ORIGIN = "https://app.example.org"
pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def published() -> int:
    """The port that the Compose files publish for this machine."""
    (port,) = find_free(1)
    return port


@pytest.fixture(scope="module")
def proxy(published: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """NGINX as in containers, with an origin in its map."""
    folder = tmp_path_factory.mktemp("nginx")
    with answering(b"instance") as instance:
        made = prepare([instance.removeprefix("http://")], folder, {f'# "{ORIGIN}"': f'"{ORIGIN}"'})
        port = made.local_url.rpartition(":")[2]
        text = (SHIPPED / "local.compose.conf").read_text(encoding="utf-8")
        for shipped, own in (("listen 4604", f"listen 127.0.0.1:{published}"), ("127.0.0.1:4603", f"127.0.0.1:{port}")):
            assert shipped in text
            text = text.replace(shipped, own)
        with (folder / "upstream.conf").open("a", encoding="utf-8") as file:
            file.write(text)
        with running(made.command, {}, int(port), "/readyz", folder / "nginx.log"):
            yield made


def test_the_published_port_leads_to_the_local_listener(proxy: Proxy, published: int) -> None:
    with httpx.Client(verify=proxy.trust) as client:
        for path in ("/health", "/metrics", "/docs"):
            assert client.get(f"{proxy.url}{path}").status_code == 404
            assert client.get(f"http://127.0.0.1:{published}{path}").content == b"instance"


def test_pages_of_listed_origins_read_the_errors_of_nginx(proxy: Proxy) -> None:
    with httpx.Client(verify=proxy.trust, base_url=proxy.url) as client:
        listed, other = (client.get("/no/such/path", headers={"Origin": origin}) for origin in (ORIGIN, "https://example.org"))

    assert listed.json()["code"] == other.json()["code"] == "not_found"
    assert listed.headers["access-control-allow-origin"] == ORIGIN
    assert listed.headers["access-control-expose-headers"] == "Retry-After, X-Request-ID"
    assert "access-control-allow-origin" not in other.headers


def test_a_browser_may_ask_whether_a_page_may_read_a_model(proxy: Proxy) -> None:
    transport = httpx.HTTPTransport(verify=proxy.trust, local_address="127.0.0.9")
    with httpx.Client(transport=transport, base_url=proxy.url) as client:
        statuses = {method: client.request(method, "/models/tiny").status_code for method in ("GET", "OPTIONS", "POST", "DELETE")}

    assert statuses == {"GET": 200, "OPTIONS": 501, "POST": 403, "DELETE": 403}
