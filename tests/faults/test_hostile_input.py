"""Bodies, images and networks that are broken, crafted or misleading: none does harm, and each gets the answer that says why."""

from collections import Counter
from functools import partial
from pathlib import Path
from random import Random

import msgspec
import pytest

from app.embedded import control
from app.embedded.server import EmbeddedTriton
from app.host import sandbox
from app.settings.schema import Settings
from app.zoo.repository import Repository
from tests.fakes import models
from tests.faults import corpus
from tests.faults.exchange import NO_ANSWER, Case, ask, ask_all, encode
from tests.faults.serving import Gateway, unharmed
from tests.nginx import proxying
from tests.support import triton_home
from tests.zoo.exported import exported
from tests.zoo.hostile import add_hostile, hostile, mutated

_HEAD = b"POST /detect HTTP/1.1\r\nHost: nereid\r\n"
_CHUNKED = b"Transfer-Encoding: chunked\r\n"
_BOTH = b"Content-Length: 5\r\n" + _CHUNKED + b"\r\n3\r\nabc\r\n0\r\n\r\n"
FRAMINGS = [
    b"Content-Length: -5\r\n\r\nxxxxx",
    b"Content-Length: 5x\r\n\r\nxxxxx",
    b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nxxxxxx",
    _BOTH,
    b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    _CHUNKED + b"\r\nzz\r\nxx\r\n0\r\n\r\n",
    _CHUNKED + b"\r\n11111111111111111\r\nxx\r\n0\r\n\r\n",
    _CHUNKED + b"\r\n1\r\nxxxx\r\n0\r\n\r\n",
]
_HOSTILE, _MUTATED = 50, 150


@pytest.mark.system
async def test_unclear_framing_is_rejected_and_nginx_passes_none_on(gateway: Gateway, tmp_path: Path) -> None:
    """So that it and the gateway cannot disagree about where a request ends."""
    head = _HEAD + b"X-Request-ID: unclear-framing\r\n"
    with unharmed(gateway):
        own = {framing: await ask(gateway.url, _HEAD + framing) for framing in FRAMINGS}
    with proxying([gateway.address], tmp_path) as proxy:
        answers = [await ask(proxy.local_url, head + framing) for framing in FRAMINGS]

    assert {answer.status for answer in own.values()} <= {400, 415, NO_ANSWER}
    # Granian prefers the chunks; nothing behind them is taken for another request.
    assert (own[_BOTH].status, own[_BOTH].headers["connection"]) == (415, "close")
    assert {answer.status for answer in answers} <= {400, 501}
    assert "unclear-framing" not in gateway.log.read_text(encoding="utf-8")


async def test_thousands_of_broken_images_do_no_harm(gateway: Gateway) -> None:
    """A file that was cut anywhere in its pixels is answered with 422, never with detections on grey."""
    random = Random(4603)  # noqa: S311 - the same images in each run
    images = corpus.valid_images()
    broken = [
        Case(f"{name} {number}" if number < 19 and "animated" not in name else "", encode(cut))  # only the first frame counts
        for name, data in images.items()
        for number, cut in enumerate(corpus.truncate(data), 1)
    ]
    broken += [Case("", encode(corpus.damage(data, random))) for data in images.values() for _ in range(40)]
    broken += [Case("", encode(corpus.invent(random))) for _ in range(300)]
    random.shuffle(broken)

    with unharmed(gateway, growth_mb=50):
        answers = await ask_all(gateway.url, broken)

    assert len(answers) > 3_000
    assert {answer.status for _, answer in answers} <= {200, 413, 415, 422}
    assert {label: answer.status for label, answer in answers if label and answer.status not in {415, 422}} == {}


def test_served_triton_survives_hostile_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are added, or refused; nothing is left of them."""
    monkeypatch.setattr(sandbox, "_SECONDS", 5.0)
    home, served = tmp_path / "triton", tmp_path / "served"
    home.mkdir()
    served.mkdir()
    models.write(tmp_path / "all")
    (tmp_path / "all" / "six_columns").rename(served / "six_columns")
    settings = Settings(triton_home=triton_home(home), model_repository=str(served), model="six_columns")
    apart = Repository(tmp_path / "added")
    apply = partial(control.apply, msgspec.structs.replace(settings, model_repository=str(apart.path)))
    whole = exported({"output0": (7, 84)}, (64, 64)).SerializeToString()
    added = Counter[str]()
    triton = EmbeddedTriton(settings)
    triton.claim()
    try:
        triton.start()
        for kind, content in [*hostile(_HOSTILE), *(("mutated", content) for content in mutated(whole, _MUTATED))]:
            added[kind] += not add_hostile(content, apart, apply)
            assert triton.poll() is None, kind
        triton.check()
    finally:
        triton.stop()

    assert added["mutated"] > _MUTATED / 10  # whose weights are other ones
    assert not any(added[kind] for kind in ("endless", "claiming", "limited", "nested", "outside", "foreign"))
