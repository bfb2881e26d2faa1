"""API keys: what a file may contain, which credentials it accepts, and when it is read again."""

import errno
import hashlib
import hmac
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from structlog.testing import CapturedCall

from app.api.caller.keys import ApiKeys, KeysError, create, load
from app.resilience import last_valid
from app.resilience.fairness import HIGH, LOW, NORMAL, Caller
from tests.support import captured_log

SECRET = "a-secret-that-must-not-be-shown"  # noqa: S105 - it protects nothing
SHA256 = hashlib.sha256(SECRET.encode()).hexdigest()
OTHER = hashlib.sha256(b"other").hexdigest()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[CapturedCall]:
    return captured_log(monkeypatch, last_valid)


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = 100.0

    def pass_by(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(last_valid, "monotonic", lambda: now)
    return pass_by


def table(id_: str = "camera-1", sha256: str = f'["{SHA256}"]', scopes: str = '["detect"]', more: str = "") -> str:
    return f"[{id_}]\nsha256 = {sha256}\nscopes = {scopes}\n{more}\n"


def found(known: ApiKeys, credential: str) -> str | None:
    key = known.find(credential.encode())
    return key and key.id


def test_file_is_read_by_id(path: Path) -> None:
    path.write_text(
        table(more='share = 0.25\npriority = "low"')
        + table("b_2", f'["{OTHER.upper()}", "{SHA256}"]', '["health", "detect"]')
        + table("c", more='priority = "high"')
    )
    read = load(path)

    assert {id_: (key.id, set(key.scopes), key.caller, key.caller.priority) for id_, key in read.items()} == {
        "camera-1": ("camera-1", {"detect"}, Caller("camera-1", 0.25, has_share=True, priority=LOW), LOW),
        "b_2": ("b_2", {"detect", "health"}, Caller("b_2", 0.75), NORMAL),
        "c": ("c", {"detect"}, Caller("c", 0.75, priority=HIGH), HIGH),
    }
    assert [digest.hex() for digest in read["camera-1"].digests] == [SHA256, SHA256]
    assert [digest.hex() for digest in read["b_2"].digests] == [OTHER, SHA256]


TABLE_RULE = ": [camera-1]: expected sha256 ("
ID_RULE = ": a key's id has 1 to 64 letters, digits, '_' or '-'"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # With a file that an editor or a full disk has truncated, everybody would be refused.
        ("# the keys of the cameras\n", " has no key"),
        *(
            (table(sha256=digests), TABLE_RULE)
            for digests in ("[]", f"{[SHA256] * 3}", f'"{SHA256}"', f'["{SHA256[1:]}"]', f'["{SHA256}\\n"]', f'["{SECRET}"]')
        ),
        *((table(scopes=scopes), TABLE_RULE) for scopes in ("[]", f'["{SECRET}"]')),
        *((table(more=f"share = {share}"), TABLE_RULE) for share in ("1.0", "-0.1", "nan", '"0.1"')),
        *((table(more=more), TABLE_RULE) for more in (f'priority = "{SECRET}"', f'{SECRET} = "secret"', 'tenant = "a b"')),
        (table(f"camera-1.{SECRET}"), TABLE_RULE),
        (f'[camera-1]\nsha256 = ["{SHA256}"]\n', TABLE_RULE),
        (f'camera-1 = "{SECRET}"\n', TABLE_RULE),
        *((table(id_), ID_RULE) for id_ in ('""', '"a\\n"', '"ä"', f'"{"x" * 65}"', f'"camera-1.{SECRET}"')),
        ("[camera-1", " is not valid TOML: at end of document"),
        (f"[a.{SECRET}]\n[a.{SECRET}]\n", " is not valid TOML: at line 2, column 35"),
        ("\udcff", " is not valid TOML: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (table("a", more="share = 0.5") + table("b", more="share = 0.5"), ": the shares of all keys add up to 1 or more"),
    ],
)
def test_file_that_is_not_valid_is_rejected(path: Path, text: str, message: str) -> None:
    with pytest.raises(KeysError, match=f"^{path}: No such file or directory$"):
        load(path)
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(KeysError) as caught:
        load(path)

    assert str(caught.value).startswith(f"{path}{message}")
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


def test_created_key_is_accepted(path: Path) -> None:
    """The id is part of the credential and of a TOML table."""
    credential, text = create("camera-1")
    path.write_text(table("other") + text)

    assert len(secret := credential.removeprefix("camera-1.")) == 43
    assert secret not in text
    assert load(path)["camera-1"].scopes == {"detect"}
    assert found(ApiKeys(path), credential) == "camera-1"
    assert create("camera-1")[0] != credential
    for id_ in ("", "a.b", "a\n"):
        with pytest.raises(KeysError, match=r"^a key's id has 1 to 64 letters"):
            create(id_)


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


@pytest.mark.parametrize("is_replaced", [False, True])
def test_changed_file_is_read_again_within_a_second(
    path: Path, wait: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, *, is_replaced: bool
) -> None:
    path.write_text(table("old"))
    known = ApiKeys(path)
    looked: list[Path] = []
    stat = Path.stat
    monkeypatch.setattr(Path, "stat", lambda self: looked.append(self) or stat(self))  # type: ignore[func-returns-value]
    for _ in range(7):
        wait(0.25)
        assert found(known, f"old.{SECRET}") == "old"
    assert looked == [path]

    target = path.with_suffix(".new") if is_replaced else path
    target.write_text(table("new"))
    target.rename(path)
    wait(1)
    assert found(known, f"old.{SECRET}") is None
    assert found(known, f"new.{SECRET}") == "new"


def test_invalid_change_keeps_the_keys_and_is_logged_once(
    path: Path, wait: Callable[[float], None], log: list[CapturedCall]
) -> None:
    path.write_text(table())
    known = ApiKeys(path)
    log.clear()

    for change in (partial(path.write_text, table(scopes=f'["{SECRET}"]')), partial(path.write_text, ""), path.unlink):
        change()
        for _ in range(3):
            wait(1)
            assert found(known, f"camera-1.{SECRET}") == "camera-1"
    assert last_valid.refused == {"api_keys": f"{path}: No such file or directory"}
    assert [(line.method_name, line.kwargs["file"]) for line in log] == 3 * [("error", "api_keys")]
    assert SECRET not in repr(log)

    log.clear()
    path.write_text(table())
    wait(1)
    known.find(b"")
    assert [(line.args, line.kwargs) for line in log] == [(("a file is valid again",), {"file": "api_keys"})]
    assert last_valid.refused == {}


def test_file_that_cannot_be_read_for_a_moment_is_read_again(
    path: Path, wait: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not changed, but it has not been read."""
    path.write_text(table("old"))
    known = ApiKeys(path)
    path.write_text(table("new"))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", Mock(side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
        wait(1)
        assert found(known, f"old.{SECRET}") == "old"
    wait(1)

    assert found(known, f"new.{SECRET}") == "new"
