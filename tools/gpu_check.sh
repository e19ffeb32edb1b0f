#!/usr/bin/env bash
# Checks and measures the engine on a CUDA machine, within 9 minutes: parity tests on the device, then benchmarks.
# Needs no network and no installation: python3 with torch, transformers, safetensors, tokenizers, jinja2, numpy,
# pytest and hypothesis. usage: tools/gpu_check.sh [DEVICE] [GEOMETRY]      default: cuda qwen3-0.6b
set -uo pipefail
cd "$(dirname "$0")/.."
device=${1:-cuda}
geometry=${2:-qwen3-0.6b}
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1

"$python" - "$device" <<'PY' || exit 1
import sys, torch, transformers
name = sys.argv[1]
if name.startswith("cuda") and not torch.cuda.is_available():
    sys.exit("gpu_check: torch sees no CUDA device")
shown = torch.cuda.get_device_name() if name.startswith("cuda") else "CPU"
print(f"{shown}, torch {torch.__version__}, transformers {transformers.__version__}, Python {sys.version.split()[0]}")
PY

beside=() # several tests at once, where pytest-xdist is there
"$python" -c "import xdist" 2>/dev/null && beside=(-n 8 --dist worksteal)
status=0
echo "== parity, kernels, engine (at most 270 s)"
timeout 270 "$python" -m pytest tests/parity tests/contract/test_ops.py tests/engine/test_engine.py \
    tests/engine/test_sampling.py tests/engine/test_cuda_ranks.py tests/contract/test_linear_methods.py \
    -p no:cacheprovider "${beside[@]}" -m "not slow" -k "not native and not cpu" || status=$?
echo "== copies of KV in the host's memory (at most 60 s)"
timeout 60 "$python" -m pytest tests/engine/test_host_tier.py -p no:cacheprovider || status=$?
echo "== benchmarks (at most 200 s)"
for measured in "$geometry" qwen3-moe-1.7b deepseek-2b "qwen3-0.6b --quantization int8"; do
    # shellcheck disable=SC2086 -- a geometry and its options
    timeout 50 "$python" tools/device_bench.py --device "$device" --geometry $measured --seconds 35 || status=$?
done
exit $status
