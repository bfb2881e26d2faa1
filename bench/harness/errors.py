"""Errors of the harness."""


class ContestantError(Exception):
    """A server cannot be measured; the message is one line for the user."""
