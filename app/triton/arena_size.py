"""How large arenas are."""

SLOTS = 32
"""Images that an arena has room for, at most. If a worker handles more at a time, the tensors of the others are sent inline."""
MAX_ARENA_BYTES = 128 << 20
MAX_WORKER_BYTES = 256 << 20
"""All arenas of a worker together."""


def arena_bytes(slot_bytes: int) -> int:
    """Return the size of an arena for tensors of this size; 0 if one alone is too large."""
    return min(SLOTS, MAX_ARENA_BYTES // slot_bytes) * slot_bytes
