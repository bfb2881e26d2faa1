"""Tables that are written are read as they were."""

import tomllib

from app.host import toml

CONTENT = {
    "name": 'says "no"\\ é',
    "share": 1e-7,
    "labels": ["a", "b"],
    "v1.doors": {"to": "x", "canary": {"share": 0.5, "is on": True}},
    "versions": {"1": "a"},
    "empty": {},
}


def test_tables_of_tables_are_read_as_they_were() -> None:
    assert tomllib.loads(toml.dump({**CONTENT, "nothing": None})) == CONTENT
