#!/usr/bin/env bash
# Prepares .venv: tools/setup.sh [EXTRA,...]   with the project's extras to install, such as bench,dev
# Without an NVIDIA GPU it takes the CPU build of torch, and never the CUDA one, which is several GB.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=${1:-bench}
cpu_torch=2.13.0

python=""
for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "setup: Python 3.11 or newer is needed; set PYTHON to one" >&2
    exit 1
fi

[ -x .venv/bin/python ] || "$python" -m venv .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
        echo "setup: an NVIDIA GPU is here; installing torch with CUDA"
        pip install --quiet "torch>=2.11,<2.14"
    elif [ "$(uname -s)" = Linux ]; then
        echo "setup: no NVIDIA GPU; installing the CPU build of torch $cpu_torch"
        # the local version "+cpu" cannot match a CUDA build, wherever pip looks
        pip install --quiet "torch==$cpu_torch+cpu" 2>/dev/null ||
            pip install --quiet "torch==$cpu_torch+cpu" --extra-index-url https://download.pytorch.org/whl/cpu
    else
        pip install --quiet "torch==$cpu_torch"
    fi
fi
echo "setup: installing penstock[$extras]"
pip install --quiet --editable ".[$extras]"
.venv/bin/python -m penstock.nn.native
