#!/usr/bin/env bash
# Installs penstock[mooncake] into .venv, and the three libraries of Debian or Ubuntu that its wheel links to.
# Without root they are unpacked below .venv; the last line says how to run with them.
set -euo pipefail
cd "$(dirname "$0")/.."
libraries=(libibverbs1 librdmacm1 libnuma1)

.venv/bin/python -m pip install --quiet --editable ".[mooncake]"
if .venv/bin/python -c 'import mooncake.engine' 2>/dev/null; then
    exit
fi
if [ "$(id -u)" = 0 ]; then
    apt-get install --yes --no-install-recommends "${libraries[@]}"
else
    folder=$PWD/.venv/debian
    mkdir -p "$folder"
    # what they need themselves comes along
    (cd "$folder" && apt-get download "${libraries[@]}" libnl-3-200 libnl-route-3-200)
    for package in "$folder"/*.deb; do
        dpkg -x "$package" "$folder"
    done
    paths=$(find "$folder" -name '*.so.*' -printf '%h\n' | sort -u | paste -sd:)
    export LD_LIBRARY_PATH=$paths${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    echo "export LD_LIBRARY_PATH=$LD_LIBRARY_PATH"
fi
.venv/bin/python -c 'import mooncake.engine'
