"""Choose one of several Tritons for a call."""

import random
from collections.abc import Sequence

from app.triton.served_model import ServedModel


def choose(candidates: Sequence[ServedModel]) -> ServedModel:
    """Choose, of two drawn at random, the one with the fewest images under way for its speed; at least one is given.

    To compare all would let every worker choose the same one at the same moment.
    """
    if len(candidates) == 1:
        return candidates[0]
    one, other = random.sample(candidates, 2)
    speed, other_speed = one.speed, other.speed
    if not speed or not other_speed:  # one that has shown nothing is taken to be as fast as the other
        speed = other_speed = 1.0
    load, other_load = one.images / speed, other.images / other_speed
    if load == other_load:  # mostly, both are idle; the slower one is tried now and then, as it may have become faster
        return one if random.random() * (speed + other_speed) < speed else other  # noqa: S311 - not a secret
    return one if load < other_load else other
