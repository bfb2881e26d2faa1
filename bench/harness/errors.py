"""What the harness reports to the person at the terminal."""


class ContestantError(Exception):
    """A server cannot be measured; the message is one line for the person at the terminal."""
