"""TLS to Triton: real handshakes with certificates of a CA of the tests."""

from pathlib import Path

import grpc
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat, load_pem_private_key

from app.errors import TritonUnavailable
from app.main import create_app
from app.settings.schema import Settings
from app.triton.client import TritonClient
from app.triton.credentials import CredentialsError, load
from app.triton.server_info import ServerInfo
from tests.fakes.triton import FakeTriton, serving
from tests.support import json, started

OURS, THEIRS = trustme.CA(), trustme.CA()
HOST, NAME = "127.0.0.1", "gpu.example.org"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The certificate of our CA, and a client certificate of it."""
    (tmp_path / "ca.crt").write_bytes(OURS.cert_pem.bytes())
    issue(OURS, tmp_path)
    return tmp_path


def issue(authority: trustme.CA, folder: Path) -> None:
    issued = authority.issue_cert("own.example.org")
    (folder / "tls.crt").write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    (folder / "tls.key").write_bytes(issued.private_key_pem.bytes())


def server_tls(authority: trustme.CA, host: str = HOST, clients: trustme.CA | None = None) -> grpc.ServerCredentials:
    """Make the credentials of a server; with `clients`, it requires a certificate of that CA."""
    issued = authority.issue_cert(host)
    pair = issued.private_key_pem.bytes(), b"".join(pem.bytes() for pem in issued.cert_chain_pems)
    return grpc.ssl_server_credentials([pair], clients and clients.cert_pem.bytes(), require_client_auth=clients is not None)


async def answers(client: TritonClient) -> bool:
    try:
        return await client.read_server() == ServerInfo("2.51.0")
    except TritonUnavailable:
        return False
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("authority", "named", "is_called"),
    [
        (OURS, HOST, True),
        (THEIRS, HOST, False),
        (OURS, NAME, False),
        (None, HOST, False),
    ],
    ids=["ours", "another CA", "another host", "server without TLS"],
)
async def test_triton_is_called_if_our_authority_certifies_its_host(
    folder: Path, authority: trustme.CA | None, named: str, *, is_called: bool
) -> None:
    fake = FakeTriton()
    async with serving(fake, tls=authority and server_tls(authority, named)) as port:
        assert await answers(TritonClient(f"{HOST}:{port}", credentials=load(str(folder)))) is is_called
    assert bool(fake.server_reads) is is_called


@pytest.mark.parametrize(("named", "is_called"), [(NAME, True), ("other.example.org", False)])
async def test_resolved_name_is_the_one_that_must_be_certified(folder: Path, named: str, *, is_called: bool) -> None:
    """The certificate does not contain the name's IP addresses."""
    async with serving(FakeTriton(), tls=server_tls(OURS, named)) as port:
        credentials = load(str(folder))
        assert await answers(TritonClient(f"{HOST}:{port}", credentials=credentials, host=NAME)) is is_called
        assert await answers(TritonClient(f"{NAME}:{port}", credentials=credentials, ips=[HOST])) is is_called


async def test_certificate_is_shown_to_a_triton_that_asks(folder: Path) -> None:
    async with serving(FakeTriton(), tls=server_tls(OURS, clients=OURS)) as port:
        settings = Settings(
            model="tiny",
            model_repository=str(folder),
            transport="inline",
            log_level="error",
            triton_endpoints=f"{HOST}:{port}",
            triton_tls_folder=str(folder),
        )
        async with started(create_app(settings)) as client:
            models = json(await client.get("/models"))["models"]
            assert [model["name"] for model in models if model["state"] != "not_pulled"] == ["a", "b", "c"]
        issue(THEIRS, folder)
        assert not await answers(TritonClient(f"{HOST}:{port}", credentials=load(str(folder))))


OTHER = OURS.issue_cert("own.example.org").private_key_pem.bytes()
ENCRYPTED = load_pem_private_key(OTHER, None).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("ca.crt", b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n", " is not a certificate in PEM"),
        ("tls.crt", b"no certificate\n", " is not a certificate in PEM"),
        ("tls.key", None, ": No such file or directory"),
        ("tls.key", b"a secret that is no key\n", " is not a private key in PEM"),
        ("tls.key", OTHER, " is not the key of {}/tls.crt"),
        ("tls.key", ENCRYPTED, " is encrypted; a key without a passphrase is needed"),
    ],
)
def test_file_that_is_not_valid_is_named_without_its_content(folder: Path, name: str, content: bytes | None, message: str) -> None:
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)

    with pytest.raises(CredentialsError) as caught:
        load(str(folder))
    assert str(caught.value) == f"{folder / name}{message.format(folder)}"
