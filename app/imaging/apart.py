"""Decode AVIF, HEIC and some TIFFs in processes of their own, with limits of memory and time.

Whatever size its boxes say, a small file can make the libraries that decode it take minutes or gigabytes, and a decoding thread
cannot be stopped. So this module, run as a program, is started at the first such file. It forks for each file: the fork is
limited, decodes, sends the pixels and ends. A file that crashes or misleads it harms no other.

OpenCV decodes AVIF and TIFF, and pi-heif, if it is installed, HEIC. What OpenCV says of a TIFF, it says on stderr only, which
threads cannot tell apart.
"""

import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from math import prod
from pathlib import Path
from threading import Lock

import cv2
import numpy as np
from numpy.typing import NDArray

from app.errors import GatewayFull, InvalidImage
from app.host import program
from app.imaging import heif, tiff

# Limit of memory in bytes per pixel: several copies of the planes, which AV1 and HEVC have of up to 12 bits. AVIFs of 12 megapixels
# took 16 to 24 bytes per pixel, and HEICs 4 to 14, and 3 in the gateway.
PIXEL_BYTES = {"AVIF": 32, "HEIC": 16, "TIFF": tiff.PIXEL_BYTES}
_SIMPLE_HEIC_BYTES = 8
HAS_HEIC = find_spec("pi_heif") is not None

FILE_COPIES = 3
# Tables of the decoders, and the stack of a thread.
_SPARE_BYTES = 16 << 20
# Limits of CPU time, a quarter of the usual speed for large images, and of time, for one that waits for a CPU.
_MIN_CPU_SECONDS, _PIXELS_PER_SECOND = 1, 2_000_000
_SECONDS = 60
# Width, height.
_REPLY = struct.Struct("LL")
# The level at which OpenCV 4 writes what libtiff says; OpenCV 5 does so at that of warnings.
_DEBUG = 5
_HARMLESS = re.compile(rb".*Old-style LZW codes.*\n")
# Source: ITU-R BT.601, 2.5.3.
_FULL_RANGE = np.clip(np.rint((np.arange(256) - 16) * 255 / 219), 0, 255).astype(np.uint8)


def pixel_bytes(name: str, data: bytes) -> int:
    """Return the memory limit of decoding a file, in bytes per pixel."""
    return _SIMPLE_HEIC_BYTES if name == "HEIC" and heif.is_simple_hevc(data) else PIXEL_BYTES[name]


def decode_bytes(name: str, pixels: int, data: bytes) -> int:
    """Return the memory limit in bytes of decoding a file with this number of pixels, without a small constant amount."""
    return pixels * pixel_bytes(name, data) + len(data) * FILE_COPIES


class Decoders:
    """Starts the program when it is first needed and when it has ended. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests = socket.socket()

    def decode(self, data: bytes, name: str) -> NDArray[np.uint8]:
        """Decode a file to (height, width, 3) RGB, an AVIF or HEIC upright; a TIFF is as `tiff.rewrite` returns it."""
        # Raises InvalidImage if that takes more memory or time than its size should, GatewayFull if this host cannot run a process.
        pixels = prod(tiff.read_size(data) if name == "TIFF" else heif.find_size(data))
        if not pixels:
            raise InvalidImage(f"the {name} has no image, or is truncated")
        cpu_seconds = _MIN_CPU_SECONDS + pixels // _PIXELS_PER_SECOND
        request = f"{name} {decode_bytes(name, pixels, data) + _SPARE_BYTES} {cpu_seconds}"
        try:
            ours, theirs = socket.socketpair()
            with ours, ours.makefile("rb") as reply:
                with theirs:
                    process = self._send(request.encode(), theirs.fileno())
                with suppress(ConnectionError):
                    ours.sendall(data)
                    ours.shutdown(socket.SHUT_WR)
                with suppress(ConnectionError, struct.error):
                    width, height = _REPLY.unpack(reply.read(_REPLY.size))
                    found = np.empty((height, width, 3), np.uint8)
                    if width * height <= pixels and reply.readinto(found.data) == found.nbytes:
                        return found
                if process.poll() is not None:
                    raise ChildProcessError
        except OSError as error:
            raise GatewayFull("the gateway cannot run another process for an image", "memory") from error
        raise InvalidImage("the image data is truncated or corrupt, or takes more memory or time than its size should")

    def _send(self, request: bytes, reply: int) -> "subprocess.Popen[bytes]":
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._requests.close()
                self._requests, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
                with theirs:
                    command, environment = program.command("app.imaging.apart"), program.environment()
                    self._process = subprocess.Popen(command, stdin=theirs.fileno(), env=environment)  # noqa: S603 - itself
            socket.send_fds(self._requests, [request], [reply])
            return self._process

    def close(self) -> None:
        """Let the program end."""
        with self._lock:
            self._requests.close()
            if self._process is not None:
                self._process.wait()
                self._process = None


DECODERS = Decoders()


def _main() -> None:
    # Signals to this process's group are ignored: the one who stops the group still needs the images.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    cv2.setNumThreads(1)
    if HAS_HEIC:
        import pi_heif  # noqa: PLC0415, F401 - once, not in each fork
    with socket.socket(fileno=sys.stdin.fileno()) as requests:
        while True:
            request, files, _, _ = socket.recv_fds(requests, 64, 1)
            if not request:
                return
            with socket.socket(fileno=files[0]) as client:
                if os.fork() == 0:
                    with suppress(Exception):  # the decoders raise anything
                        _answer(client, *request.decode().split())
                    os._exit(0)


def _answer(client: socket.socket, name: str, nbytes: str, cpu_seconds: str) -> None:
    in_use = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5]) * resource.getpagesize()
    for kind, limit in (
        (resource.RLIMIT_DATA, in_use + int(nbytes)),
        (resource.RLIMIT_CPU, int(cpu_seconds)),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    signal.alarm(_SECONDS)
    with client.makefile("rwb") as file:
        pixels = {"AVIF": _decode_avif, "HEIC": _decode_heic, "TIFF": _decode_tiff}[name](file.read())
        height, width = pixels.shape[:2]
        file.write(_REPLY.pack(width, height))
        # Grey becomes RGB, alpha is dropped.
        file.write(np.ascontiguousarray(np.broadcast_to(pixels[:, :, :3], (height, width, 3))).data)


def _decode_avif(data: bytes) -> NDArray[np.uint8]:
    # As BGR, because OpenCV returns that for a sequence with alpha, whatever is asked for.
    file = np.frombuffer(heif.image_alone(data), np.uint8)
    decoded = np.asarray(cv2.imdecode(file, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION), np.uint8)
    cv2.cvtColor(decoded, cv2.COLOR_BGR2RGB, dst=decoded)
    if heif.is_limited_grey(data):  # which OpenCV does not notice
        cv2.LUT(decoded, _FULL_RANGE, dst=decoded)
    return heif.turn(data, heif.crop(data, decoded))


def _decode_heic(data: bytes) -> NDArray[np.uint8]:
    import pi_heif  # noqa: PLC0415 - optional

    pi_heif.options.DECODE_THREADS = 1
    pixels = np.array(pi_heif.open_heif(data))  # a copy: its memory ends with the file
    if pixels.dtype == np.uint16:  # grey of more than 8 bits
        pixels = (pixels >> 8).astype(np.uint8)
    return np.atleast_3d(pixels)


def _decode_tiff(data: bytes) -> NDArray[np.uint8]:
    # libtiff leaves black what is missing, says so, and goes on.
    log = os.memfd_create("log")
    os.dup2(log, 2)  # also if stderr was closed at the start
    tiff.set_log_level(_DEBUG)
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)
    if _HARMLESS.sub(b"", os.pread(log, os.fstat(log).st_size, 0)):
        raise InvalidImage("the image data is truncated or corrupt")
    return np.asarray(pixels, np.uint8)


if __name__ == "__main__":
    _main()
