# Every recipe runs in .venv, which the ./just script sets up.
export PATH := justfile_directory() / ".venv/bin:" + env("PATH")

# List the recipes
default:
    @{{ just_executable() }} --list --justfile {{ justfile() }}

# Write the lock files anew from pyproject.toml
[group('develop')]
lock:
    uv pip compile -q --universal --generate-hashes --no-header -o requirements/api.txt pyproject.toml
    uv pip compile -q --universal --generate-hashes --no-header -c requirements/api.txt -o requirements/dev.txt pyproject.toml --group models --group test --group lint
    uv pip compile -q --universal --generate-hashes --no-header -o requirements/tools.txt requirements/tools.in
    uv pip compile -q --universal --generate-hashes --no-header -o requirements/build.txt requirements/build.in
    uv pip compile -q --universal --generate-hashes --no-header -o requirements/triton.txt requirements/triton.in
