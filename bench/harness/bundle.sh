#!/bin/sh
# Measures this machine's GPU within nine minutes, and writes gpu.json beside this file: sh run [OPTION OF bench gpu ...]
#
# Nothing is fetched. It needs Linux on x86-64, 3 GB of disk, NVIDIA's driver 580 or later, and a python3 of the version for which
# it was packed, with its libpython (Debian: libpython3.12) and with PyTorch for CUDA 13, whose libraries ONNX Runtime uses.
set -eu
began=$(date +%s)
cd "$(dirname "$0")"
sha256sum --check --quiet SHA256SUMS
rm -rf work && mkdir work
cat part-* | tar -x -C work
cd work

# The wheel of pip runs by itself: Debian's Python comes without pip and ensurepip.
export PIP_NO_INDEX=1 PIP_FIND_LINKS="$PWD/wheels" PIP_COMPILE=no PIP_QUIET=1
pip=$(echo wheels/pip-*.whl)/pip
python3 -m venv --without-pip python
python/bin/python "$pip" install -r gateway.txt
python3 -m venv --without-pip home/python-gpu
home/python-gpu/bin/python "$pip" install --no-deps --require-hashes -r gpu.txt

# onnxruntime.preload_dlls() looks for the libraries beside its own package.
packages=$(echo "$PWD"/home/python-gpu/lib/python3*/site-packages)
cuda=$(python3 -c 'import nvidia, os; print(next(path for path in nvidia.__path__ if os.path.isdir(path + "/cu13")))' 2>/dev/null || :)
if [ -n "$cuda" ]; then ln -s "$cuda" "$packages/nvidia"; else echo 'python3 has no libraries of CUDA 13' >&2; fi
case " $* " in
*" --rehearse "*)
    cp source/bench/models/simulated_cuda.py "$packages"
    echo 'import simulated_cuda' >"$packages/simulated_cuda.pth"
    ;;
esac
export NEREID_TRITON_HOME="$PWD/home" NEREID_MODEL_REPOSITORY="$PWD/models"
mkdir home/python # for the CPU, on which nothing shall run
python/bin/python -c 'from app.embedded.install import REQUIREMENTS, Path, tag_of
for home in map(Path("home").joinpath, REQUIREMENTS):
    (home / "complete").write_text(tag_of(home))'

cd source
exec ../python/bin/python -m bench gpu --json ../../gpu.json --budget $((530 - $(date +%s) + began)) "$@"
