"""The table of clients in the reference, which `./just clients --record` writes."""

from tests.callers import table
from tests.callers.client import pins


def test_the_table_has_the_pinned_clients_in_their_versions() -> None:
    assert pins().items() <= {(row.client, row.version) for row in table.read()}
