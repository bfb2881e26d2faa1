"""How much memory this process and its siblings may use."""

import os
from pathlib import Path

import pytest

from app.host.memory import available_bytes, image_budget

HOST = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
VERSION_2, VERSION_1 = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, HOST),
        ({VERSION_2: "max\n"}, HOST),
        ({VERSION_2: "1073741824\n"}, 2**30),
        ({VERSION_1: "1073741824\n"}, 2**30),
        ({VERSION_1: "9223372036854771712\n"}, HOST),
        ({VERSION_2: "max\n", VERSION_1: "1073741824\n"}, 2**30),
        ({VERSION_2: ""}, HOST),
    ],
    ids=["no container", "no limit", "limit", "limit of version 1", "no limit of version 1", "both", "empty"],
)
def test_memory_is_that_of_the_container_if_it_has_less(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int
) -> None:
    """The kernel tells the limit in a file of the container's control group."""

    def read(path: Path, encoding: str) -> str:
        assert encoding
        if str(path) not in files:
            raise FileNotFoundError
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read)

    assert available_bytes() == expected


def test_memory_of_this_machine_is_plausible() -> None:
    assert 2**26 < available_bytes() <= HOST


def test_images_have_an_eighth_of_the_memory_unless_it_is_set() -> None:
    """The largest image always has room."""
    assert image_budget(100, 1) == 100 * 2**20
    assert image_budget(0, 1) == available_bytes() // 8
    assert image_budget(100, 200 * 2**20) == 200 * 2**20
