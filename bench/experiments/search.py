"""Search for the number of clients with the best throughput."""

from collections.abc import Callable

WORTH = 0.02
"""Relative gain in throughput for which more clients are preferred."""

_MAX_FALLS = 2
_REFINEMENTS = 2


def find_best(holds: Callable[[int], bool], rate: Callable[[int], float], max_clients: int) -> int | None:
    """Double the clients until the latency limit breaks or throughput falls twice; then search between the best's neighbours.

    Args:
        holds: Measures with this number of clients, and returns whether the latency limit holds. Called once per number.
        rate: Returns the measured throughput.
        max_clients: Maximum number of clients.

    Returns:
        The smallest number of clients with the best throughput; None if the limit does not hold with one client.
    """
    good: list[int] = []
    tried: list[int] = []
    falls = 0
    clients = 1
    while clients <= max_clients and falls < _MAX_FALLS:
        tried.append(clients)
        if not holds(clients):
            break
        falls = falls + 1 if good and rate(clients) <= rate(_best(good, rate)) * (1 + WORTH) else 0
        good.append(clients)
        clients *= 2
    if not good:
        return None
    for _ in range(_REFINEMENTS):
        best, around = _best(good, rate), sorted(tried)
        place = around.index(best)
        neighbours = around[max(0, place - 1) : place] + around[place + 1 : place + 2]
        for clients in sorted({(best + neighbour) // 2 for neighbour in neighbours} - set(tried)):
            tried.append(clients)
            if holds(clients):
                good.append(clients)
    return _best(good, rate)


def _best(good: list[int], rate: Callable[[int], float]) -> int:
    """Return the smallest number of clients with the best throughput."""
    highest = max(map(rate, good))
    return min(clients for clients in good if rate(clients) * (1 + WORTH) >= highest)
