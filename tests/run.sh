#!/usr/bin/env bash
# The one script of all checks, the same here and in CI. Further arguments go to pytest.
#   --full   everything, with what takes minutes, and the benchmarks' tables
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

full=""
if [ "${1:-}" = "--full" ]; then full=1; shift; fi
bash deploy/install.sh "$([ -n "$full" ] && echo --full || echo --dev)" || exit 1
bin="$PWD/.venv/bin"
export PATH="$bin:$PATH" PYTHONPATH=.ns:.
# what a test starts has this in its environment, so that what it leaves can be told from other people's processes
export STAGEMESH_TEST_MARK="$$-$RANDOM$RANDOM"

failed=()
step() {
    local name="$1"
    shift
    printf '== %s\n' "$name"
    "$@" || failed+=("$name")
}

step "protos" python protos/generate.py --check
step "ruff check" ruff check .
step "ruff format" ruff format --check .
step "mypy" mypy
step "import-linter" lint-imports --no-cache
if [ -n "$full" ]; then
    for bench in tests/bench/*.py; do
        step "$bench" python "$bench"
    done
    selection=()
else
    selection=(-m "not full")
fi
if [ "${#failed[@]}" -gt 0 ]; then printf '== FAILED before the tests: %s\n' "${failed[*]}"; fi

printf '== pytest\n'
python -m pytest "${selection[@]}" "$@" || failed+=("pytest")
python tests/support/leftovers.py "$STAGEMESH_TEST_MARK" $$ || failed+=("processes left")
if [ "${#failed[@]}" -gt 0 ]; then
    printf '== FAILED: %s\n' "${failed[*]}" >&2
    exit 1
fi
