"""How much memory this process and its siblings may use."""

import os

from app.host.memory import available_bytes, image_budget

HOST = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_memory_of_this_machine_is_plausible() -> None:
    assert 2**26 < available_bytes() <= HOST


def test_images_have_an_eighth_of_the_memory_unless_it_is_set() -> None:
    """The largest image always has room."""
    assert image_budget(100, 1) == 100 * 2**20
    assert image_budget(0, 1) == available_bytes() // 8
    assert image_budget(100, 200 * 2**20) == 200 * 2**20
