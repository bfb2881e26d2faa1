# Every recipe runs in .venv, which the ./just script sets up.
export PATH := justfile_directory() / ".venv/bin:" + env("PATH")

# List the recipes
default:
    @{{ just_executable() }} --list --justfile {{ justfile() }}

# Run everything: the embedded Triton and the API on port 4603
[group('run')]
[no-exit-message]
serve *args:
    @exec python -m app serve {{ args }}

# Run the API alone, for a Triton that runs elsewhere
[group('run')]
[no-exit-message]
api *args:
    @exec python -m app api {{ args }}

# Run the embedded Triton alone
[group('run')]
[no-exit-message]
triton *args:
    @exec python -m app triton {{ args }}

# Get a model; without a name, the default one
[group('run')]
pull *args:
    @python -m app pull {{ args }}

# Say what is missing or broken on this machine
[group('run')]
doctor *args:
    @python -m app doctor {{ args }}

# Run the tests, with branch coverage of app/
[group('develop')]
test *args:
    @coverage erase
    @coverage run -m pytest {{ args }}
    @coverage combine --quiet
    @coverage report

# What must pass before a commit: format, lint, types, import contracts, tests
[group('develop')]
check: lint test

# Check the format, lint, types and import contracts
[group('develop')]
lint:
    ruff format --check .
    ruff check .
    mypy
    lint-imports

# Format, and fix what can be fixed
[group('develop')]
fmt:
    ruff format .
    ruff check --fix .

# Measure: quick, full, sustained, sweep, open, versus, limit, stages, workers, compare, report, accuracy, instances
[group('develop')]
bench *args:
    @python -m bench {{ args }}

# Watch a worker under load with py-spy: a flame graph
[group('develop')]
profile seconds="60" out="profile.svg" *args:
    @python -m bench profile {{ seconds }} {{ out }} {{ args }}

# Write the lock files anew from pyproject.toml
[group('develop')]
lock:
    uv pip compile -q --universal --generate-hashes --no-header -o requirements/api.txt pyproject.toml
    uv pip compile -q --universal --generate-hashes --no-header -c requirements/api.txt -o requirements/dev.txt pyproject.toml --group models --group test --group bench --group lint
    uv pip compile -q --universal --generate-hashes --no-header -o requirements/tools.txt requirements/tools.in
    uv pip compile -q --universal --generate-hashes --no-header -o requirements/build.txt requirements/build.in
    uv pip compile -q --universal --generate-hashes --no-header -o requirements/triton.txt requirements/triton.in
    uv pip compile -q --universal --generate-hashes --no-header -o requirements/reference.txt requirements/reference.in

# Remove what was installed, pulled and cached here
[group('develop')]
clean:
    rm -rf .venv .triton .reference .coverage* .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache model_repository/*/1
