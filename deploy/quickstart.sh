#!/usr/bin/env bash
# From a fresh clone on Debian 12 to an answer: installs into .venv, starts a mesh of two prefill and two decode stages
# on the CPU with a small model, asks it a question, and stops it again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

question="${1:-What is the capital of France?}"
limit_s=300
work=""
mesh=""

say() { printf '== %s\n' "$*" >&2; }

stop_mesh() {
    [ -n "$mesh" ] || return 0
    local pid="$mesh"
    mesh=""
    kill -TERM "$pid" 2>/dev/null || true
    wait "$pid"
}

cleanup() {
    stop_mesh || true
    if [ -n "$work" ]; then rm -rf "$work"; fi
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

bash deploy/install.sh
work="$(mktemp -d)"

say "starting the mesh (its log: $work/log)"
.venv/bin/stagemesh up --port 0 --ready-file "$work/ready.json" 2>"$work/log" &
mesh=$!
for ((waited = 0; ; waited++)); do
    [ -f "$work/ready.json" ] && break
    if ! kill -0 "$mesh" 2>/dev/null || [ "$waited" -ge "$((limit_s * 5))" ]; then
        cat "$work/log" >&2
        say "the mesh did not start"
        exit 1
    fi
    sleep 0.2
done
router="$(.venv/bin/python -c 'import json, sys; print(json.load(open(sys.argv[1]))["router"])' "$work/ready.json")"
cp "$work/ready.json" "$work/started.json" # the original goes away with the mesh

say "asking the router at $router: $question"
if ! .venv/bin/stagemesh generate --router "$router" --chat "$question"; then
    cat "$work/log" >&2
    say "no answer"
    exit 1
fi

say "stopping the mesh"
code=0
stop_mesh || code=$?
if [ "$code" -ne 0 ]; then
    cat "$work/log" >&2
    say "the mesh stopped with exit code $code"
    exit 1
fi
.venv/bin/python - "$work/started.json" <<'PYTHON'
import json, os, sys
left = [p["name"] for p in json.load(open(sys.argv[1]))["processes"] if os.path.exists(f"/proc/{p['pid']}")]
sys.exit(f"== still running: {', '.join(left)}" if left else 0)
PYTHON
say "done: start one for yourself with .venv/bin/stagemesh up"
