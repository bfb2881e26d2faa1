"""A cached result as bytes: what a model has found in an image, with a checksum that only this secret makes, for one key."""

from hashlib import blake2b

import msgspec
import numpy as np

from app.detection.nms import Candidates
from app.imaging.transform import ImageTransform
from app.model.spec import ModelSpec
from app.pipeline.call import Decoded
from app.text.outputs import TextSteps

_CHECKSUM_BYTES = 16


class _Entry(msgspec.Struct, array_like=True):
    version: str
    transform: ImageTransform
    seconds: float
    """What the inference took."""
    arrays: list[memoryview]
    """Probabilities (classes,); or boxes (n, 4), scores (n,), class ids (n,), maybe features (n, features). FP32, the ids INT32."""


_DECODER = msgspec.msgpack.Decoder(_Entry)


def dump(decoded: Decoded, seconds: float, key: bytes, secret: bytes) -> bytes:
    """Return what a model without prototypes has found, as bytes."""
    found = decoded.found
    assert not isinstance(found, TextSteps)  # noqa: S101 - as `ResultCache.takes` says
    arrays = [array for array in found if array is not None] if isinstance(found, Candidates) else [found]
    entry = _Entry(decoded.version, decoded.transform, seconds, [memoryview(array.tobytes()) for array in arrays])
    content = msgspec.msgpack.encode(entry)
    return _checksum(content, key, secret) + content


def load(value: bytes, key: bytes, spec: ModelSpec, secret: bytes) -> tuple[Decoded, float] | None:
    """Return what `dump` got for this key, and the seconds; None if `value` is anything else. The arrays are read-only."""
    content = memoryview(value)[_CHECKSUM_BYTES:]
    if value[:_CHECKSUM_BYTES] != _checksum(content, key, secret):
        return None
    entry = _DECODER.decode(content)
    numbers, *others = [np.frombuffer(array, np.float32) for array in entry.arrays]
    if not others:
        return Decoded(spec, entry.version, numbers, entry.transform), entry.seconds
    scores, class_ids, *more = others
    features = more[0].reshape(len(scores), spec.head.features) if more else None
    found = Candidates(numbers.reshape(-1, 4), scores, class_ids.view(np.int32), features)
    return Decoded(spec, entry.version, found, entry.transform), entry.seconds


def _checksum(content: bytes | memoryview, key: bytes, secret: bytes) -> bytes:
    return blake2b(content, digest_size=_CHECKSUM_BYTES, key=secret, salt=key[:16], person=key[16:]).digest()
