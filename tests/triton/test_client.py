"""The RPCs of the client, also over TLS: what Triton parses and answers, which errors it means, and what is known about it."""

from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat, load_pem_private_key

from app.errors import (
    DeadlinePassed,
    GatewayError,
    InferenceFailed,
    InvalidModelOutput,
    ModelNotReady,
    TritonUnavailable,
    UnknownModel,
)
from app.main import create_app
from app.model.spec import from_triton_config
from app.settings.schema import Settings
from app.triton import client as client_module
from app.triton.client import TritonClient
from app.triton.credentials import CredentialsError, load
from app.triton.messages import InferResult
from app.triton.server_info import ServerInfo
from app.triton.status import (
    Disconnected,
    Draining,
    ModelDied,
    ModelFailed,
    NoReply,
    Overloaded,
    Refused,
    Unanswered,
    UnknownRegion,
    Unreachable,
    from_query_error,
    own_message,
)
from tests.fakes.triton import CONFIG, SPEC, FakeTriton, serving
from tests.support import eventually, json, started


async def test_server_is_known_while_it_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton may come back with another version, and tell it late."""
    monkeypatch.setattr(client_module, "_QUERY_SECONDS", 0.1)
    fake = FakeTriton()
    async with serving(fake) as port:
        client = TritonClient(f"127.0.0.1:{port}")
        await eventually(lambda: client.server == ServerInfo("2.51.0"))
        fake.version, fake.extensions = "2.59.1", ["statistics"]
        assert [await client.read_server(), client.server] == [ServerInfo("2.59.1", ("statistics",)), ServerInfo("2.51.0")]
    await eventually(lambda: client.server is None)

    fake.query_refusal = grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"
    before = fake.server_reads
    async with serving(fake, port):
        await eventually(lambda: fake.server_reads > before)
        assert client.server is None
        fake.query_refusal = None
        await eventually(lambda: client.server == ServerInfo("2.59.1", ("statistics",)))
        assert client.connection > 1
        await client.close()


BATCHED = from_triton_config({**CONFIG, "max_batch_size": 8}, "1")


def test_result_of_a_batch_is_split_by_image() -> None:
    boxes = np.arange(24, dtype=np.float32).reshape(3, 2, 4)
    for index, part in enumerate(InferResult({"boxes": boxes}, "7").split(BATCHED, 3)):
        assert (part.version, part.outputs["boxes"].tolist()) == ("7", boxes[index : index + 1].tolist())

    result = InferResult({"count": np.array(5)}, "1")  # of a model without a batch dimension
    assert result.split(SPEC, 1) == [result]
    for shape in ((), (2, 4), (4, 4)):  # of another number of images
        with pytest.raises(InvalidModelOutput, match=r"tiny returned boxes of shape .* for a batch of 3"):
            InferResult({"boxes": np.zeros(shape)}, "1").split(BATCHED, 3)


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        ("UNAVAILABLE", "Request timeout expired", DeadlinePassed),
        ("UNAVAILABLE", "Exceeds maximum queue size", Overloaded),
        ("UNAVAILABLE", "Server is stopping, scheduler for model has stopped", Draining),
        ("UNAVAILABLE", "Request for unknown model: 'tiny' has no available versions", ModelNotReady),
        ("UNAVAILABLE", "This protocol is restricted, expecting header 'nereid'", InferenceFailed),
        ("UNAVAILABLE", "failed to connect to all addresses; last error: connection refused", Unreachable),
        ("UNAVAILABLE", "DNS resolution failed for triton:8001", Unreachable),
        ("UNAVAILABLE", "Socket closed", Disconnected),
        ("RESOURCE_EXHAUSTED", "not enough memory", Overloaded),
        ("INTERNAL", "Failed to increase the shared memory pool size for key 'nereid'", Overloaded),
        ("INTERNAL", "Stub process 'tiny_0_0' is not healthy.", ModelDied),
        ("INTERNAL", "Received RST_STREAM with error code 2", Disconnected),
        ("INTERNAL", "onnx runtime error 1", ModelFailed),
        ("NOT_FOUND", "Request for unknown model: 'tiny' is not found", UnknownModel),
        ("NOT_FOUND", "Unable to find shared memory region: 'nereid-1-0'", UnknownRegion),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", Unanswered),
        ("CANCELLED", "RPC ended", TritonUnavailable),
        ("INVALID_ARGUMENT", "unexpected shape for input", InferenceFailed),
        ("UNIMPLEMENTED", "Received http2 header with status: 404", Refused),
        ("UNKNOWN", "/opt/secret/path", Refused),
    ],
)
async def test_status_and_message_of_a_refusal_determine_the_error(
    fake_triton: tuple[FakeTriton, TritonClient], status: str, text: str, expected: type[GatewayError]
) -> None:
    """The status alone is ambiguous. The caller never sees the message, and may retry whatever is unavailable."""
    fake, client = fake_triton
    fake.refusal = grpc.StatusCode[status], text
    with pytest.raises(GatewayError) as caught:
        await client.infer(SPEC, [np.zeros(SPEC.image_shape, np.uint8)], timeout_seconds=5)

    error = caught.value
    assert type(error) is expected
    assert text not in error.detail
    assert own_message(error) == text
    if isinstance(error, TritonUnavailable):
        assert (error.status, error.code, error.retry_after_seconds) == (503, "triton_unavailable", 1)
    assert isinstance(error.__cause__, grpc.RpcError)
    assert type(from_query_error(error.__cause__)) is (NoReply if issubclass(expected, DeadlinePassed) else expected)


OURS, THEIRS = trustme.CA(), trustme.CA()
HOST, NAME, ELSEWHERE = "127.0.0.1", "gpu.example.org", "other.example.org"


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


async def test_triton_is_called_if_our_authority_certifies_its_host(folder: Path) -> None:
    """The certificate of a name that was resolved does not contain its IP addresses."""
    rows: list[tuple[trustme.CA | None, str, str, dict[str, Any], bool]] = [
        (OURS, HOST, HOST, {}, True),
        (THEIRS, HOST, HOST, {}, False),
        (OURS, NAME, HOST, {}, False),
        (None, HOST, HOST, {}, False),
        (OURS, NAME, HOST, {"host": NAME}, True),
        (OURS, NAME, NAME, {"ips": [HOST]}, True),
        (OURS, ELSEWHERE, HOST, {"host": NAME}, False),
        (OURS, ELSEWHERE, NAME, {"ips": [HOST]}, False),
    ]
    for row in rows:
        authority, certified, called, resolved, is_called = row
        fake = FakeTriton()
        async with serving(fake, tls=authority and server_tls(authority, certified)) as port:
            client = TritonClient(f"{called}:{port}", credentials=load(str(folder)), **resolved)
            assert await answers(client) is bool(fake.server_reads) is is_called, row


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
