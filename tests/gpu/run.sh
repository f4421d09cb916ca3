#!/usr/bin/env bash
# Numerics, then benchmarks, on as many GPUs as there are. On a host without a network, set the environment up first.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH=".ns:.${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
count="$(python3 -c 'import torch; print(torch.cuda.device_count())')"
if [ "$count" -lt 1 ]; then echo "no GPU is seen" >&2; exit 1; fi
failed=()
step() {
    printf '== %s\n' "$*"
    "$@" || failed+=("$*")
}

step python3 -m pytest -q -s -p no:cacheprovider tests/gpu/check_*.py
step python3 tests/gpu/bench_step.py
all="$(seq -s, 0 $((count < 2 ? 0 : 1)))"
loads=128x1000x1000,1x1000x200,64x8000x1000,1x30000x100
step python3 tests/gpu/bench_mesh.py --prefill-gpus "$all" --decode-gpus "$all" --loads "$loads" ENGINE__DECODE_YIELD_S=2
if [ "$count" -ge 2 ]; then
    step python3 tests/gpu/bench_mesh.py --prefill-gpus "$all" --decode-gpus "$all" --rounds 1 ENGINE__RUN_AHEAD=0 ENGINE__DECODE_YIELD_S=2
    step python3 tests/gpu/bench_mesh.py --prefill-gpus 0 --decode-gpus 1 --rounds 1
    step python3 tests/gpu/bench_mesh.py --prefill-gpus 0 --decode-gpus 0 --rounds 1 ENGINE__DECODE_YIELD_S=3
fi
if [ "${#failed[@]}" -gt 0 ]; then
    printf '== FAILED: %s\n' "${failed[@]}" >&2
    exit 1
fi
