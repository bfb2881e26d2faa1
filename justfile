# Recipes run in .venv. What needs it depends on `_setup`, so that it is set up also where `just` is called instead of ./just.
export PATH := justfile_directory() / ".venv/bin:" + env("PATH")

compile := "uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header"
# All extras but `models`, and pillow-simd in the place of Pillow.
own := "--override requirements/override.in pyproject.toml --group simd --extra heic --extra masks --extra ocr --extra otel --extra redis --extra search"

# List the recipes
default:
    @{{ just_executable() }} --list --justfile {{ justfile() }}

# With the PATH of the caller: Python must not be that of an outdated .venv, which is about to be removed.
[no-exit-message]
_setup:
    @PATH={{ quote(env("PATH")) }} ./just _setup

# Run the embedded Triton and the API on port 4603
[group('run')]
[no-exit-message]
serve *args: _setup
    @exec python -m app serve {{ args }}

# Run the API alone
[group('run')]
[no-exit-message]
api *args: _setup
    @exec python -m app api {{ args }}

# Run search alone on port 4605
[group('run')]
[no-exit-message]
search *args: _setup
    @exec python -m app search {{ args }}

# Run the embedded Triton alone
[group('run')]
[no-exit-message]
triton *args: _setup
    @exec python -m app triton {{ args }}

# Detect the objects in pictures and folders, with a gateway that runs as long as that takes
[group('run')]
[no-exit-message]
detect *args: _setup
    @python -m app detect {{ args }}

# Get a model; the default one if no name is given
[group('run')]
pull *args: _setup
    @python -m app pull {{ args }}

# Add a network of your own, exported to ONNX
[group('run')]
[no-exit-message]
add *args: _setup
    @python -m app add {{ args }}

# List the added models
[group('run')]
models *args: _setup
    @python -m app models {{ args }}

# Make a version, such as doors:1, the default version of an added model
[group('run')]
[no-exit-message]
use *args: _setup
    @python -m app use {{ args }}

# Remove an added model, or a version of it
[group('run')]
[no-exit-message]
remove *args: _setup
    @python -m app remove {{ args }}

# Create an API key; its credential goes to stdout, its table for NEREID_API_KEYS_FILE to stderr
[group('run')]
[no-exit-message]
key *args: _setup
    @python -m app key {{ args }}

# Check this machine and a running Triton
[group('run')]
doctor *args: _setup
    @python -m app doctor {{ args }}

# Copy the database of search into a file, or back: backup|restore FILE
[group('run')]
[no-exit-message]
database *args: _setup
    @python -m app database {{ args }}

# Build dist/nereid, one executable with Python inside; it needs the glibc of the machine where it is built, or a later one
[group('ship')]
binary: _setup
    pyinstaller --noconfirm --log-level WARN --distpath dist --workpath build/binary deploy/binary/nereid.spec

# Build the container image `api`, or `embedded`, with podman, docker or buildah; options go to the builder
[group('ship')]
[no-exit-message]
image *args:
    @deploy/container/build {{ args }}

# Make what a release has, into dist/: wheels, pillow-simd, the one file, images with SBOM, notes and checksums, or the parts that are named; needs root, Docker and debootstrap
[group('ship')]
[no-exit-message]
release *args: _setup
    @python deploy/release/make.py {{ args }}

# Run the tests in two processes, in an order that is shuffled anew each time
[group('develop')]
test *args: _setup
    @python -m pytest -n 2 --dist loadfile {{ args }}

# Run the tests with real servers, restarts and real time, and those of the bench; nginx, Prometheus, Chromium and Graphviz must be installed
[group('develop')]
test-system *args: _setup
    @python -m pytest -n 2 --dist loadfile -m system -o timeout=600 -o faulthandler_timeout=660 {{ args }}

# Run the tests with branch coverage of app/, which takes a third longer
[group('develop')]
coverage *args: _setup
    @coverage erase
    @coverage run -m pytest -n 2 --dist loadfile {{ args }}
    @coverage combine --quiet
    @coverage report

# Change the code in small wrong ways, and see which the tests notice
[group('develop')]
mutants *args: _setup
    @python -m pytest -q -p tests.tools.contexts -n 2 --dist loadfile -m 'not faults and not packages and not soak and not clients and not texts' --cov=app --cov-context=test --cov-report=
    @python -m tests.tools.mutants {{ args }}

# Serve, detect and stop once: a quick check of another Python or machine
[group('develop')]
smoke: _setup
    @python -m pytest -q -m system -o timeout=600 -o faulthandler_timeout=660 tests/system/test_serve.py::test_serve_detects_and_stops

# Inject faults and hostile input into real processes; nginx and Prometheus must be installed
[group('develop')]
[positional-arguments]
faults *args: _setup
    @python -m pytest -n 2 --dist loadfile -m faults -p no:randomly -o timeout=1800 -o faulthandler_timeout=1860 "$@"

# Build the wheel, the one file and the container images, and run them where nothing else is installed, and by Compose; needs root, Docker, docker-compose and debootstrap
[group('develop')]
packages *args: _setup
    @python -m pytest -m packages -o timeout=3000 -o faulthandler_timeout=3060 {{ args }}

# Let processes die and clients leave for about 16 minutes, and look for losses, wrong answers and leaks; nginx must be installed
[group('develop')]
soak *args: _setup
    @python -m pytest -m soak -p no:randomly -o timeout=1800 -o faulthandler_timeout=1860 {{ args }}

# Run the programs that call detectors, each in an environment of its own, against a served gateway; nginx and haproxy must be installed; --record renews docs/reference/clients.md
[group('develop')]
clients *args: _setup
    @python -m pytest -n 2 --dist loadfile -m clients -o timeout=1200 -o faulthandler_timeout=1260 tests/callers {{ args }}

# Take the newest versions of those programs, and run them
[group('develop')]
raise-clients: _setup (_lock-clients "--upgrade")
    {{ just_executable() }} --justfile {{ justfile() }} clients --record

# Everything that must pass before a commit: format, lint, types, import contracts, texts, tests
[group('develop')]
check: lint test

# Renew docs/reference/openapi.json after a change of the API
[group('develop')]
openapi: _setup
    @python -m tests.tools.openapi

# Renew the PrometheusRule in deploy/kubernetes after a change of the alerts or recordings
[group('develop')]
rules: _setup
    @python -m tests.tools.kubernetes_rules

# Check format, lint rules, types and import contracts, and documentation and files for deployment against the code
[group('develop')]
lint: _setup
    ruff format --check .
    ruff check .
    mypy
    PYTHONPATH=clients/label-studio/src lint-imports
    python -m pytest -q -n 2 --dist loadfile -m texts
    @echo "tests: $(($(git ls-files -z 'tests/*.py' | xargs -0 cat | wc -l) * 100 / $(git ls-files -z 'app/*.py' | xargs -0 cat | wc -l))) lines for 100 of app"

# Format the code, and fix what can be fixed automatically
[group('develop')]
fmt: _setup
    ruff format .
    ruff check --fix .

# Build the documentation into docs/_build/html; graphviz must be installed
[group('develop')]
[no-exit-message]
docs *args: _setup
    @command -v dot >/dev/null || { echo 'dot, which draws the diagrams, is not installed; on Debian: apt-get install graphviz' >&2; exit 1; }
    @sphinx-build -W --keep-going -n -q -E -d docs/_build/doctrees {{ args }} docs docs/_build/html

# Train and export the models of tasks beside detection that the system tests compare with; about half an hour, once
[group('develop')]
task-models: _setup
    @cmp -s requirements/task_models.txt .task_models/environment/locked || {{ just_executable() }} --justfile {{ justfile() }} _task-models-environment
    @PYTHONPATH=tests/task_models/stand_in YOLO_CONFIG_DIR=.task_models YOLO_OFFLINE=true .task_models/environment/bin/python -m tests.task_models .task_models

# PyTorch comes as the index has it: its build without CUDA is much smaller, and on PyPI there is none for Linux.
_task-models-environment:
    python -m venv --clear .task_models/environment
    .task_models/environment/bin/pip install -q --only-binary=:all: torch==2.13.0
    .task_models/environment/bin/pip install -q --require-hashes --no-deps --only-binary=:all: -r requirements/task_models.txt
    cp requirements/task_models.txt .task_models/environment/locked

# Install NVIDIA's parser and compiler of ONNX, with which test-system examines the composed models: 370 MB, once
[group('develop')]
tensorrt-rtx: _setup
    @python -c 'from bench.harness.environments import TENSORRT_RTX; TENSORRT_RTX.install()'

# Show in three minutes what callers get of 25 lines of FastAPI and of Nereid, alone and while things go wrong; --write draws a chart
[group('run')]
[no-exit-message]
demo *args: _setup
    @python -m bench demo {{ args }}

# Measure what this machine does with the default model, or: limit quick full sustained sweep open locust versus peers overload fair gpu stages search masks compare report
[group('develop')]
bench *args: _setup
    @python -m bench {{ args }}

# Find the instances, threads, batches, delays and calls with which a model does most here; --write changes its config
[group('run')]
[no-exit-message]
tune *args: _setup
    @python -m bench tune {{ args }}

# Record a flame graph of a worker with py-spy, under load or, with --url or --pid, while its requests are slow
[group('develop')]
profile seconds="60" out="profile.svg" *args: _setup
    @python -m bench profile {{ seconds }} {{ out }} {{ args }}

# Update the lock files from pyproject.toml and requirements/*.in
[group('develop')]
lock: _setup && _lock-clients
    {{ compile }} -o requirements/api.txt {{ own }}
    {{ compile }} -c requirements/api.txt -o requirements/dev.txt {{ own }} --extra models --group test --group bench --group lint --group deploy --group docs
    {{ compile }} -c requirements/dev.txt -o requirements/embedded.txt {{ own }} --extra models
    {{ compile }} -c requirements/dev.txt -o requirements/sbom.txt requirements/sbom.in
    {{ compile }} -o requirements/tools.txt requirements/tools.in
    {{ compile }} -o requirements/build.txt requirements/build.in
    {{ compile }} -o requirements/release.txt requirements/release.in
    {{ compile }} -o requirements/reference.txt requirements/reference.in
    {{ compile }} -o requirements/locust.txt requirements/locust.in
    {{ compile }} -o requirements/peers.txt requirements/peers.in
    {{ compile }} --emit-build-options -o requirements/roboflow.txt --override requirements/roboflow_override.in requirements/roboflow.in
    {{ compile }} -o requirements/tensorrt_rtx.txt requirements/tensorrt_rtx.in
    {{ compile }} -o requirements/task_models.txt --override requirements/task_models_override.in requirements/task_models.in
    {{ compile }} -o app/embedded/requirements.txt requirements/triton.in
    {{ compile }} -c app/embedded/requirements.txt -o app/embedded/requirements_gpu.txt --override requirements/triton_gpu_override.in requirements/triton_gpu.in

_lock-clients *args:
    for wanted in requirements/clients/*.in; do {{ compile }} --emit-build-options {{ args }} -o "${wanted%.in}.txt" "$wanted"; done

# Remove everything that was installed, pulled or cached here, but not models that were added
[group('develop')]
clean:
    rm -rf .venv .uv .python .triton .postgres .reference .locust .peers .roboflow .tensorrt_rtx .clients .task_models build dist docs/_build *.egg-info clients/*/build clients/*/src/*.egg-info .coverage* .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache model_repository/yolo11n model_repository/yolo11n_file model_repository/yolox_nano model_repository/efficientnet_lite0 model_repository/embedding model_repository/ocr_* model_repository/faces_*
