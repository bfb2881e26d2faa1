"""What answers ZeroMQ's sockets of type REQ, in version 3.0 of its protocol. Source: https://rfc.zeromq.org/spec/23/.

libzmq limits the size of a frame, but reads any number of them into memory, because a message is received as a whole.
"""

from asyncio import StreamReader, StreamWriter

from app.errors import MalformedRequest

_MECHANISM = b"NULL".ljust(20, b"\0")
_GREETING = b"\xff" + bytes(8) + b"\x7f\3\0" + _MECHANISM + bytes(32)
_READY = b"\5READY\x0bSocket-Type\0\0\0\6ROUTER"
_MAX_READY_BYTES = 512
_MORE, _LONG, _COMMAND = 1, 2, 4
_DELIMITER = bytes([_MORE, 0])
"""The empty first frame of messages of REQ sockets."""


async def greet(reader: StreamReader, writer: StreamWriter) -> None:
    """Agree on the protocol with a peer that has connected; raise MalformedRequest if it speaks another one."""
    writer.write(_GREETING + bytes([_COMMAND, len(_READY)]) + _READY)
    greeting = await reader.readexactly(len(_GREETING))
    if (greeting[0], greeting[9], greeting[12:32]) != (0xFF, 0x7F, _MECHANISM) or greeting[10] < _GREETING[10]:
        raise MalformedRequest("the peer does not speak ZMTP 3 without authentication")
    flags, _ = await _read_frame(reader, _MAX_READY_BYTES)
    if flags & ~_LONG != _COMMAND:
        raise MalformedRequest("the peer sends messages before it is ready")


async def wait_for_message(reader: StreamReader) -> None:
    """Wait until a message begins; raise MalformedRequest if it is not that of a REQ socket, so that it cannot be answered."""
    if await reader.readexactly(len(_DELIMITER)) != _DELIMITER:
        raise MalformedRequest("the peer is not a socket of type REQ")


async def read_message(reader: StreamReader, *max_bytes: int) -> list[bytes]:
    """Read the frames of a message that has begun; raise MalformedRequest, before it is read, for one too many or too large."""
    frames = []
    for limit in max_bytes:
        flags, frame = await _read_frame(reader, limit)
        frames.append(frame)
        if flags & ~_LONG == 0:
            return frames
    raise MalformedRequest("a message has too many frames")


def write_message(writer: StreamWriter, frame: bytes) -> None:
    """Answer a message with one frame."""
    writer.write(_DELIMITER + bytes([_LONG]) + len(frame).to_bytes(8) + frame)


async def _read_frame(reader: StreamReader, max_bytes: int) -> tuple[int, bytes]:
    flags = (await reader.readexactly(1))[0]
    size = int.from_bytes(await reader.readexactly(8 if flags & _LONG else 1))
    if size > max_bytes:
        raise MalformedRequest(f"a frame has {size} bytes; the maximum is {max_bytes}")
    return flags, await reader.readexactly(size)
