"""The blocks of commands in the documentation, and the shell script that runs those of one file."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from markdown_it import MarkdownIt

from tests.support import ROOT, free_port

ADDRESS = "127.0.0.1:4603"
"""The gateway's address in the documentation."""
_OTHER_PORT = "9090"
"""The port of another program that a block starts."""
_LANGUAGES = {"sh", "python"}
_OTHER_NAMES = {"bash", "console", "py", "python3", "shell", "shell-session", "zsh"}
_ERROR = re.compile(r'"status": ?[45]\d\d')
_MARK = re.compile(r"<!-- (?:(background)|no-run: (\S.*)) -->")

# What would change the machine, and an error response that the documentation does not show, fail a block. With job control,
# a block in the background has a process group of its own, which a signal reaches as Ctrl-C does.
_PRELUDE = r"""set -e -o pipefail
shows_error=False
curl() {
    if [ $shows_error = True ] || [[ " $*" =~ \ -[a-zA-Z]*f ]]; then command curl "$@"; else command curl --fail-with-body "$@"; fi
}
refuse() { echo 'this changes the machine: mark the block with <!-- no-run: reason -->'; exit 1; }
for name in apt apt-get docker install kubectl podman sudo systemctl; do
    eval "$name() { refuse; }"
done
server=
stop() {
    [ -n "$server" ] || return 0
    kill -- "-$server" || :
    while kill -0 -- "-$server" 2>/dev/null; do sleep 0.1; done
    server=
}
trap stop EXIT
trap 'exit 1' TERM
"""
_BACKGROUND = """stop
mkdir {home}; ln -s "$NEREID_TRITON_HOME"/server "$NEREID_TRITON_HOME"/python {home}
export NEREID_PORT={port} NEREID_TRITON_HOME={home}
set -m
{{
{code}
}} &
server=$!
set +m
until {is_ready}; do
    kill -0 $server || exit 1
    sleep 0.2
done
"""


class Block(NamedTuple):
    """A fenced block in the language `sh` or `python`."""

    language: str
    code: str
    line: int
    mark: Literal["background", "no-run"] | None
    """From a comment directly before the block: it starts a server, or it is not run."""
    shows_error: bool
    """Whether the next block is an error response."""


def pages() -> list[Path]:
    """Return the files whose blocks are run."""
    files = [ROOT / "README.md", ROOT / "deploy" / "README.md", ROOT / "examples" / "README.md", *ROOT.glob("docs/**/*.md")]
    return sorted(path for path in files if "_build" not in path.parts)


def find_blocks(text: str) -> list[Block]:
    """Find the blocks of a Markdown text.

    Raises:
        ValueError: A block has another name of one of the languages, or a mark that is none.
    """
    blocks: list[Block] = []
    before = ""
    for token in MarkdownIt().parse(text):
        if token.type == "fence" and token.map:
            line = token.map[0] + 1
            if token.info in _OTHER_NAMES:
                raise ValueError(f"line {line}: the language is {token.info}, not sh or python")
            if token.info in _LANGUAGES:
                blocks.append(Block(token.info, token.content, line, _mark(before, line), shows_error=False))
            elif blocks and _ERROR.search(token.content):
                blocks[-1] = blocks[-1]._replace(shows_error=True)
        before = token.content if token.type == "html_block" else ""
    return blocks


def _mark(comment: str, line: int) -> Literal["background", "no-run"] | None:
    if match := _MARK.fullmatch(comment.strip()):
        return "background" if match[1] else "no-run"
    if re.match("<!-- *(background|no-run)", comment):
        raise ValueError(f"line {line}: {comment.strip()} is neither <!-- background --> nor <!-- no-run: reason -->")
    return None


def script(blocks: Sequence[Block], port: int) -> str:
    """Return a script for bash that runs blocks as a reader does, in one shell, and ends the server that a block has started.

    Until a block starts a server of its own, in a home in the working directory, the gateway at `port` is used.
    """
    parts = [_PRELUDE]
    other_port = free_port()
    for block in blocks:
        parts.append(f"echo; echo '--- line {block.line}'\nshows_error={block.shows_error}\n")
        code = block.code
        if block.language == "python":
            code = f"python - <<'END_OF_PYTHON'\n{code}END_OF_PYTHON\n"
        if block.mark == "background":
            port = free_port()
            is_ready = _is_ready(code, port)
            code = _BACKGROUND.format(code=code, port=port, home=f"$PWD/triton-{block.line}", is_ready=is_ready)
        parts.append(re.sub(rf"\b{_OTHER_PORT}\b", str(other_port), code.replace(ADDRESS, f"127.0.0.1:{port}")))
    return "".join(parts)


def _is_ready(code: str, port: int) -> str:
    """Return the command that asks the server of a block, or each of its instances, whether it is ready."""
    if instances := re.search(r"--instances (\d+)", code):
        urls = [f"--unix-socket run/nereid-{number + 1}.sock http://localhost" for number in range(int(instances[1]))]
    else:
        urls = [f"http://127.0.0.1:{port}"]
    return " && ".join(f"curl -fs {url}/readyz" for url in urls)
