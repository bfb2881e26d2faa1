"""Options of the command line."""

from argparse import ArgumentParser, ArgumentTypeError
from pathlib import Path

import pytest

from bench.experiments.options import add_shared, count, describe, positive


def test_numbers_out_of_range_are_rejected() -> None:
    assert count("3") == 3
    assert positive("0.5") == 0.5
    for text in ("0", "-1"):
        with pytest.raises(ArgumentTypeError):
            count(text)
        with pytest.raises(ArgumentTypeError):
            positive(text)
    with pytest.raises(ArgumentTypeError):
        positive("inf")


def test_a_record_lists_the_options_that_have_a_value() -> None:
    parser = ArgumentParser()
    add_shared(parser, images=None, before=None)
    parser.set_defaults(run=print, json=Path("out"), only=["nereid_shm", "nereid_file"], contests=[])

    assert describe(parser.parse_args(["--before", "folder"])) == {"before": "folder", "only": "nereid_shm, nereid_file"}
