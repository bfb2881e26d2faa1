"""The search for the best number of clients."""

import pytest

from bench.experiments.search import find_best


@pytest.mark.parametrize(
    ("rates", "fits", "best"),
    [
        ({1: 10, 2: 20, 3: 25, 4: 30, 8: 60}, 8, 8),
        ({1: 10, 2: 20, 4: 30, 8: 30}, 256, 4),
        ({1: 10, 2: 9}, 256, 1),
        ({1: 10}, 0, None),
    ],
    ids=["latency breaks", "throughput ends", "one is best", "none"],
)
def test_the_search_finds_the_best_number_of_clients(rates: dict[int, float], fits: int, best: int | None) -> None:
    tried: list[int] = []

    def holds(clients: int) -> bool:
        tried.append(clients)
        return clients <= fits

    def rate(clients: int) -> float:
        return max(value for count, value in rates.items() if count <= clients)

    found = find_best(holds, rate, 256)

    assert found == best
    assert len(tried) == len(set(tried)) <= 13
