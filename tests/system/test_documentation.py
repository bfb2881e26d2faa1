"""The commands in the documentation work, in a copy of the repository, with a gateway that `serve` runs."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

import pytest
from markdown_it import MarkdownIt

from app.host.processes import end_group
from app.triton.repository import REMOVED
from bench.harness.processes import running
from tests.postgres import database_home
from tests.processes import PATIENCE_SECONDS, require_program
from tests.support import ROOT, free_port, triton_home

_MODELS = ("yolo11n", "efficientnet_lite0")
_STOP_SECONDS = 30
_ADDRESS = "127.0.0.1:4603"
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
        parts.append(re.sub(rf"\b{_OTHER_PORT}\b", str(other_port), code.replace(_ADDRESS, f"127.0.0.1:{port}")))
    return "".join(parts)


def _is_ready(code: str, port: int) -> str:
    """Return the command that asks the server of a block, or each of its instances, whether it is ready."""
    if instances := re.search(r"--instances (\d+)", code):
        urls = [f"--unix-socket run/nereid-{number + 1}.sock http://localhost" for number in range(int(instances[1]))]
    else:
        urls = [f"http://127.0.0.1:{port}"]
    return " && ".join(f"curl -fs {url}/readyz" for url in urls)


class Served(NamedTuple):
    port: int
    environ: dict[str, str]
    models: Path
    log: Path


def _copy_checkout(folder: Path) -> None:
    """Copy what is not ignored, and an environment that `./just` takes for complete."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    environment = folder / ".venv"
    environment.mkdir()
    for path in Path(sys.prefix).iterdir():
        if path.name != "locked":
            (environment / path.name).symlink_to(path)
    (locked,) = re.findall(r"^wanted=\$\((.*)\)$", (ROOT / "just").read_text(encoding="utf-8"), re.MULTILINE)
    subprocess.run(f"{locked} >.venv/locked", cwd=folder, shell=True, check=True)  # noqa: S602 - as in `just`


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A gateway with the default models and an embedded Triton."""
    folder = tmp_path_factory.mktemp("served")
    models = folder / "model_repository"
    for name in _MODELS:
        shutil.copytree(repository / name, models / name)
    for path in repository.iterdir():
        if path.is_file():
            shutil.copy(path, models)
    home = folder / "home"
    home.mkdir()
    port = free_port()
    environ = {"NEREID_PORT": str(port), "NEREID_TRITON_HOME": triton_home(home)}
    command = [sys.executable, "-m", "app", "serve"]
    settings = {**environ, "NEREID_MODEL_REPOSITORY": str(models)}
    log = folder / "serve.log"
    with running(command, settings, port, "/readyz", log, ready_seconds=PATIENCE_SECONDS):
        yield Served(port, environ, models, log)


@contextmanager
def _checkout(server: Served, network: Path) -> Iterator[Path]:
    """Make a copy of this checkout, as far as readers have it; with the gateway's models, and a network of their own.

    The models that a page has added are removed for the next one.
    """
    with TemporaryDirectory() as folder:
        copy = Path(folder) / "nereid"
        copy.mkdir()
        _copy_checkout(copy)
        shutil.rmtree(copy / "model_repository")
        (copy / "model_repository").symlink_to(server.models)
        shutil.copy(network, copy / "best.onnx")
        program = Path(folder) / "bin" / "nereid"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nPYTHONPATH={copy} exec python -m app "$@"\n', encoding="utf-8")
        program.chmod(0o755)
        try:
            yield copy
        finally:
            added = {path.parent.name for path in server.models.glob("*/model.toml")} - {*_MODELS}
            others = {"NEREID_TASK_MODELS": "embedding=none"}  # a default model is not removed
            for name in added:
                subprocess.run([program, "remove", name], cwd=copy, env={**os.environ, **server.environ, **others}, check=True)
            (server.models / REMOVED).unlink(missing_ok=True)  # the versions of the next page begin with 1


@pytest.mark.parametrize("page", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_run(page: Path, server: Served, networks: dict[str, Path]) -> None:
    require_program("curl", "curl")
    blocks = find_blocks(page.read_text(encoding="utf-8"))
    run = [block for block in blocks if block.mark != "no-run"]
    if not run:
        return
    with ExitStack() as stack:
        folder = stack.enter_context(_checkout(server, networks["yolo11n"]))
        environ = {**os.environ, **server.environ}
        if any("--search" in block.code for block in run):  # in a folder that PostgreSQL's user can enter
            environ["NEREID_DATABASE_HOME"] = str(stack.enter_context(database_home()))
        environ["PATH"] = f"{folder.parent / 'bin'}:{Path(sys.executable).parent}:{environ['PATH']}"
        log = folder.parent / "output"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", script(run, server.port)],
                cwd=folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            code = process.wait()
        finally:
            end_group(process, _STOP_SECONDS)

        lines = server.log.read_text(encoding="utf-8").splitlines()
        gateway = [line for line in lines if '"event":"request"' not in line or '"level":"error"' in line]
        failed = log.read_text(encoding="utf-8", errors="replace").rpartition("\n--- ")[2]
        assert code == 0, "\n".join(["The gateway's log:", *gateway[-20:], failed])


@pytest.mark.parametrize("code", ["sudo true", "true | false | true", "{ apt-get update; } && echo", "install -d /etc/nereid"])
def test_block_that_fails_or_changes_the_machine_is_refused(code: str) -> None:
    blocks = [Block("sh", f"{code}\n", 1, None, shows_error=False), Block("sh", "echo went on\n", 2, None, shows_error=False)]
    done = subprocess.run(["bash", "-c", script(blocks, 1)], stdout=subprocess.PIPE, text=True, check=False)

    assert (done.returncode != 0, "went on" in done.stdout) == (True, False)
