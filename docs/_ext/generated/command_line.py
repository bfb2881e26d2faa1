"""The commands and their options, from the parser."""

import argparse
from functools import partial

from app.__main__ import make_parser
from generated.markdown import define, sentence

_WIDTH = 76
"""Of usage lines, in characters."""


def render() -> str:
    """Describe all commands, in the order of `nereid --help`."""
    (commands,) = make_parser()._subparsers._group_actions  # type: ignore[union-attr]  # noqa: SLF001 - argparse has no other way
    return "\n".join(_describe(name, command) for name, command in commands.choices.items())  # type: ignore[union-attr]


def _describe(name: str, command: argparse.ArgumentParser) -> str:
    command.formatter_class = partial(argparse.HelpFormatter, width=_WIDTH)
    usage = command.format_usage().removeprefix("usage: ").strip()
    parts = [f"## {name}\n", sentence(command.description or "") + "\n", f"```text\n{usage}\n```\n"]
    for action in command._actions:  # noqa: SLF001 - as above
        if not isinstance(action, argparse._HelpAction):  # noqa: SLF001 - as above
            value = f" {action.metavar or action.dest.upper()}" if action.option_strings and action.nargs != 0 else ""
            parts.append(define("".join(action.option_strings or [action.dest]) + value, "", sentence(action.help or "")))
    return "\n".join(parts)
