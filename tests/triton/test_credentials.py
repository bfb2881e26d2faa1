"""TLS to Triton: real handshakes with certificates of a CA of the tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from app.errors import TritonUnavailable
from app.main import create_app
from app.settings.schema import Settings
from app.triton.client import TritonClient
from app.triton.credentials import Credentials, CredentialsError, load
from app.triton.server_info import ServerInfo
from tests.fakes.triton import FakeTriton, serving
from tests.support import eventually, json, started

HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def folder(authority: trustme.CA, tmp_path: Path) -> Path:
    (tmp_path / "ca.crt").write_bytes(authority.cert_pem.bytes())
    return tmp_path


@pytest.fixture
def whole(authority: trustme.CA, folder: Path) -> Path:
    """The folder, with a client certificate of the CA."""
    issue(authority, folder)
    return folder


def issue(authority: trustme.CA, folder: Path) -> None:
    issued = authority.issue_cert("own.example.org")
    (folder / "tls.crt").write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    (folder / "tls.key").write_bytes(issued.private_key_pem.bytes())


def server_tls(authority: trustme.CA, host: str = HOST, clients: trustme.CA | None = None) -> grpc.ServerCredentials:
    """Make the credentials of a server; with `clients`, it requires a certificate of that CA."""
    issued = authority.issue_cert(host)
    pair = issued.private_key_pem.bytes(), b"".join(pem.bytes() for pem in issued.cert_chain_pems)
    return grpc.ssl_server_credentials([pair], clients and clients.cert_pem.bytes(), require_client_auth=clients is not None)


@asynccontextmanager
async def connecting(port: int, tls: Credentials | None) -> AsyncIterator[TritonClient]:
    client = TritonClient(f"{HOST}:{port}", credentials=tls)
    yield client
    await client.close()


async def is_refused(port: int, tls: Credentials | None) -> bool:
    """Return whether a client with these credentials gets no answer."""
    async with connecting(port, tls) as client:
        with pytest.raises(TritonUnavailable):
            await client.read_server()
        return client.server is None


async def test_a_triton_of_our_authority_is_called(authority: trustme.CA, folder: Path) -> None:
    async with serving(FakeTriton(), tls=server_tls(authority)) as port, connecting(port, load(str(folder))) as client:
        assert await client.read_server() == ServerInfo("2.51.0")
        await eventually(lambda: client.server == ServerInfo("2.51.0"))


async def test_a_triton_of_another_authority_is_unavailable(folder: Path) -> None:
    async with serving(FakeTriton(), tls=server_tls(trustme.CA())) as port:
        assert await is_refused(port, load(str(folder)))


async def test_a_triton_with_the_name_of_another_host_is_unavailable(authority: trustme.CA, folder: Path) -> None:
    async with serving(FakeTriton(), tls=server_tls(authority, "other.example.org")) as port:
        assert await is_refused(port, load(str(folder)))


async def test_the_address_of_a_name_is_certified_by_that_name(authority: trustme.CA, folder: Path) -> None:
    """The name was resolved; the certificate does not contain its IP addresses."""
    async with serving(FakeTriton(), tls=server_tls(authority, "gpus.example.org")) as port:
        client = TritonClient(f"127.0.0.1:{port}", credentials=load(str(folder)), host="gpus.example.org")
        assert await client.read_server() == ServerInfo("2.51.0")
        await client.close()


@pytest.mark.parametrize("named", ["gpu.example.org", "other.example.org"])
async def test_a_name_that_was_resolved_is_the_one_that_must_be_certified(authority: trustme.CA, folder: Path, named: str) -> None:
    async with serving(FakeTriton(), tls=server_tls(authority, named)) as port:
        client = TritonClient(f"gpu.example.org:{port}", credentials=load(str(folder)), ips=["127.0.0.1"])
        try:
            if named == "gpu.example.org":
                assert await client.read_server() == ServerInfo("2.51.0")
            else:
                with pytest.raises(TritonUnavailable):
                    await client.read_server()
        finally:
            await client.close()


async def test_no_call_is_made_unless_client_and_server_both_use_tls(authority: trustme.CA, folder: Path) -> None:
    fake = FakeTriton()
    async with serving(fake) as port:
        assert await is_refused(port, load(str(folder)))
    async with serving(fake, tls=server_tls(authority)) as port:
        assert await is_refused(port, load(""))
    assert fake.server_reads == 0


async def test_our_certificate_is_shown_to_a_triton_that_asks(authority: trustme.CA, folder: Path) -> None:
    fake = FakeTriton()
    async with serving(fake, tls=server_tls(authority, clients=authority)) as port:
        assert await is_refused(port, load(str(folder)))
        issue(trustme.CA(), folder)
        assert await is_refused(port, load(str(folder)))
        assert fake.server_reads == 0
        issue(authority, folder)
        async with connecting(port, load(str(folder))) as client:
            assert await client.read_server() == ServerInfo("2.51.0")


async def test_the_application_uses_tls(authority: trustme.CA, whole: Path) -> None:
    async with serving(FakeTriton(), tls=server_tls(authority, clients=authority)) as port:
        settings = Settings(
            model="tiny",
            model_repository=str(whole),
            transport="inline",
            log_level="error",
            triton_endpoints=f"{HOST}:{port}",
            triton_tls_folder=str(whole),
        )
        async with started(create_app(settings)) as client:
            models = json(await client.get("/models"))["models"]
            assert [model["name"] for model in models if model["state"] != "not_pulled"] == ["a", "b", "c"]


def test_without_tls_there_are_no_credentials() -> None:
    assert load("") is None


def test_several_authorities_may_be_in_a_file_with_comments(authority: trustme.CA, tmp_path: Path) -> None:
    """Such comments are often names in any language and encoding."""
    content = "# Főtanúsítvány\n".encode() + authority.cert_pem.bytes() + trustme.CA().cert_pem.bytes()
    (tmp_path / "ca.crt").write_bytes(content)

    assert load(str(tmp_path)) == Credentials(content)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("ca.crt", None, "No such file or directory"),
        ("ca.crt", b"", "is not a certificate in PEM"),
        ("ca.crt", b"no certificate\n", "is not a certificate in PEM"),
        ("ca.crt", b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n", "is not a certificate in PEM"),
        ("tls.crt", None, "No such file or directory"),
        ("tls.crt", b"no certificate\n", "is not a certificate in PEM"),
        ("tls.key", None, "No such file or directory"),
        ("tls.key", b"a secret that is no key\n", "is not a private key in PEM"),
    ],
)
def test_a_file_that_is_not_valid_is_named(whole: Path, name: str, content: bytes | None, message: str) -> None:
    """The message is one line, and does not contain the content, which may be secret."""
    path = whole / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(CredentialsError) as caught:
        load(str(whole))
    assert str(caught.value) in {f"{path}: {message}", f"{path} {message}"}


def test_a_folder_is_not_a_file(folder: Path) -> None:
    (folder / "tls.crt").mkdir()

    with pytest.raises(CredentialsError, match=rf"^{folder}/tls.crt: Is a directory$"):
        load(str(folder))


def test_the_key_of_another_certificate_is_an_error(authority: trustme.CA, whole: Path) -> None:
    certificate = (whole / "tls.crt").read_bytes()
    issue(authority, whole)
    (whole / "tls.crt").write_bytes(certificate)

    with pytest.raises(CredentialsError) as caught:
        load(str(whole))
    assert str(caught.value) == f"{whole}/tls.key is not the key of {whole}/tls.crt"


def test_an_encrypted_key_is_an_error(whole: Path) -> None:
    """A gateway cannot ask for a passphrase, and gRPC does not support one."""
    path = whole / "tls.key"
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"secret")
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))

    with pytest.raises(CredentialsError) as caught:
        load(str(whole))
    assert str(caught.value) == f"{path} is encrypted; a key without a passphrase is needed"


def test_the_key_is_not_shown(whole: Path) -> None:
    found = load(str(whole))

    assert found is not None
    assert b"PRIVATE KEY" in (found.key or b"")
    assert "PRIVATE KEY" not in repr(found)
