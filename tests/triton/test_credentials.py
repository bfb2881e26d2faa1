"""TLS to Triton: real handshakes with certificates of an authority of the test's own."""

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
from app.triton import credentials
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
def ca_file(authority: trustme.CA, tmp_path: Path) -> str:
    return written(tmp_path / "ca.pem", authority.cert_pem.bytes())


@pytest.fixture
def own_files(authority: trustme.CA, tmp_path: Path) -> tuple[str, str]:
    return issue(authority, tmp_path, "own")


@pytest.fixture
def files(ca_file: str, own_files: tuple[str, str]) -> tuple[str, str, str]:
    """All TLS files that can be set."""
    return ca_file, *own_files


def written(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def issue(authority: trustme.CA, folder: Path, name: str) -> tuple[str, str]:
    """Issue a certificate to a client, and return its file and that of its key."""
    issued = authority.issue_cert(f"{name}.example.org")
    certificate = written(folder / f"{name}.pem", b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    return certificate, written(folder / f"{name}.key", issued.private_key_pem.bytes())


def server_tls(authority: trustme.CA, host: str = HOST, clients: trustme.CA | None = None) -> grpc.ServerCredentials:
    """Make the credentials of a server; with `clients` it demands a certificate of that authority."""
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


async def test_a_triton_of_our_authority_is_called(authority: trustme.CA, ca_file: str) -> None:
    """Its version is read as without TLS, by a call and when the channel connects."""
    async with serving(FakeTriton(), tls=server_tls(authority)) as port, connecting(port, load((ca_file, "", ""))) as client:
        assert await client.read_server() == ServerInfo("2.51.0")
        assert await eventually(lambda: client.server == ServerInfo("2.51.0"))


async def test_a_triton_of_another_authority_is_unavailable(ca_file: str) -> None:
    async with serving(FakeTriton(), tls=server_tls(trustme.CA())) as port:
        assert await is_refused(port, load((ca_file, "", "")))


async def test_a_triton_with_the_name_of_another_host_is_unavailable(authority: trustme.CA, ca_file: str) -> None:
    async with serving(FakeTriton(), tls=server_tls(authority, "other.example.org")) as port:
        assert await is_refused(port, load((ca_file, "", "")))


async def test_the_address_of_a_name_is_certified_by_that_name(authority: trustme.CA, ca_file: str) -> None:
    """The name was resolved; the certificate says nothing of its addresses."""
    async with serving(FakeTriton(), tls=server_tls(authority, "gpus.example.org")) as port:
        client = TritonClient(f"127.0.0.1:{port}", credentials=load((ca_file, "", "")), host="gpus.example.org")
        assert await client.read_server() == ServerInfo("2.51.0")
        await client.close()


@pytest.mark.parametrize("named", ["gpu.example.org", "other.example.org"])
async def test_a_name_that_was_resolved_is_the_one_that_must_be_certified(authority: trustme.CA, ca_file: str, named: str) -> None:
    async with serving(FakeTriton(), tls=server_tls(authority, named)) as port:
        client = TritonClient(f"gpu.example.org:{port}", credentials=load((ca_file, "", "")), ips=["127.0.0.1"])
        try:
            if named == "gpu.example.org":
                assert await client.read_server() == ServerInfo("2.51.0")
            else:
                with pytest.raises(TritonUnavailable):
                    await client.read_server()
        finally:
            await client.close()


async def test_nothing_is_sent_unencrypted(authority: trustme.CA, ca_file: str) -> None:
    fake = FakeTriton()
    async with serving(fake) as port:
        assert await is_refused(port, load((ca_file, "", "")))
    async with serving(fake, tls=server_tls(authority)) as port:
        assert await is_refused(port, load(None))
    assert fake.server_reads == 0


async def test_our_certificate_is_shown_to_a_triton_that_asks(
    authority: trustme.CA, files: tuple[str, str, str], tmp_path: Path
) -> None:
    fake = FakeTriton()
    async with serving(fake, tls=server_tls(authority, clients=authority)) as port:
        assert await is_refused(port, load((files[0], "", "")))
        assert await is_refused(port, load((files[0], *issue(trustme.CA(), tmp_path, "stranger"))))
        assert fake.server_reads == 0
        async with connecting(port, load(files)) as client:
            assert await client.read_server() == ServerInfo("2.51.0")


async def test_the_application_uses_tls(authority: trustme.CA, files: tuple[str, str, str], tmp_path: Path) -> None:
    async with serving(FakeTriton(), tls=server_tls(authority, clients=authority)) as port:
        settings = Settings(
            model="tiny",
            model_repository=str(tmp_path),
            transport="inline",
            log_level="error",
            triton_endpoints=f"{HOST}:{port}",
            triton_tls=True,
            triton_ca_file=files[0],
            triton_cert_file=files[1],
            triton_key_file=files[2],
        )
        async with started(create_app(settings)) as client:
            assert [model["name"] for model in json(await client.get("/models"))["models"]] == ["a", "b", "c"]


def test_without_tls_there_are_no_credentials() -> None:
    assert load(None) is None


def test_the_authorities_of_the_system_are_the_default(ca_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenSSL's variables name their place."""
    monkeypatch.setenv("SSL_CERT_FILE", ca_file)

    assert load(("", "", "")) == Credentials(Path(ca_file).read_bytes())


def test_the_authorities_of_the_system_are_found_where_systems_have_them(ca_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenSSL's default is often a folder, which gRPC cannot read."""
    monkeypatch.setenv("SSL_CERT_FILE", f"{ca_file}.nowhere")
    monkeypatch.setattr(credentials, "_SYSTEM_FILES", ())
    with pytest.raises(CredentialsError, match=r"^this system has no file of CA certificates; set NEREID_TRITON_CA_FILE$"):
        load(("", "", ""))

    monkeypatch.setattr(credentials, "_SYSTEM_FILES", (f"{ca_file}.nowhere", ca_file))
    assert load(("", "", "")) == Credentials(Path(ca_file).read_bytes())


def test_several_authorities_may_be_in_a_file_with_comments(authority: trustme.CA, tmp_path: Path) -> None:
    """Such files often contain names in any language and encoding."""
    content = "# Főtanúsítvány\n".encode() + authority.cert_pem.bytes() + trustme.CA().cert_pem.bytes()
    path = written(tmp_path / "several.pem", content)

    assert load((path, "", "")) == Credentials(content)


@pytest.mark.parametrize(
    ("place", "content", "message"),
    [
        (0, None, "{}: No such file or directory"),
        (0, b"", "{} is not a certificate in PEM"),
        (0, b"no certificate\n", "{} is not a certificate in PEM"),
        (0, b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n", "{} is not a certificate in PEM"),
        (1, None, "{}: No such file or directory"),
        (1, b"no certificate\n", "{} is not a certificate in PEM"),
        (2, None, "{}: No such file or directory"),
        (2, b"a secret that is no key\n", "{} is not a private key in PEM"),
    ],
)
def test_a_file_that_is_not_valid_is_named(
    files: tuple[str, str, str], tmp_path: Path, place: int, content: bytes | None, message: str
) -> None:
    """The message is one line and does not repeat the content, which may be secret."""
    path = str(tmp_path / "odd.pem")
    if content is not None:
        written(Path(path), content)
    ca, certificate, key = (path if number == place else file for number, file in enumerate(files))

    with pytest.raises(CredentialsError) as caught:
        load((ca, certificate, key))
    assert str(caught.value) == message.format(path)


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(CredentialsError, match=rf"^{tmp_path}: Is a directory$"):
        load((str(tmp_path), "", ""))


def test_the_key_of_another_certificate_is_an_error(authority: trustme.CA, files: tuple[str, str, str], tmp_path: Path) -> None:
    _, other = issue(authority, tmp_path, "other")

    with pytest.raises(CredentialsError) as caught:
        load((files[0], files[1], other))
    assert str(caught.value) == f"{other} is not the key of {files[1]}"


def test_an_encrypted_key_is_an_error(files: tuple[str, str, str], tmp_path: Path) -> None:
    """Neither gRPC supports it, nor is there anybody to enter a passphrase."""
    key = serialization.load_pem_private_key(Path(files[2]).read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"secret")
    content = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    path = written(tmp_path / "encrypted.key", content)

    with pytest.raises(CredentialsError) as caught:
        load((files[0], files[1], path))
    assert str(caught.value) == f"{path} is encrypted; a key without a passphrase is needed"


def test_the_key_is_not_shown(files: tuple[str, str, str]) -> None:
    found = load(files)

    assert found is not None
    assert b"PRIVATE KEY" in (found.key or b"")
    assert "PRIVATE KEY" not in repr(found)
