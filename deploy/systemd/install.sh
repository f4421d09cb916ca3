#!/usr/bin/env bash
# Copies the units to where systemd looks for them. Starts nothing.
#   deploy/systemd/install.sh [ROOT [DROP-IN ...]]
# ROOT is / by default. A drop-in is a file of examples/, such as stage/20-gpu.conf; its folder says whom it is for.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="${1:-/}"
root="${root%/}"
units="$root/etc/systemd/system"

install -d "$units/stagemesh-.service.d"
install -m 644 "$here"/*.service "$here"/*.target "$units/"
install -m 644 "$here"/stagemesh-.service.d/*.conf "$units/stagemesh-.service.d/"
for folder in sysusers.d tmpfiles.d; do
    install -D -m 644 "$here/$folder/stagemesh.conf" "$root/usr/lib/$folder/stagemesh.conf"
done
declare -A services=([all]="stagemesh-" [router]="stagemesh-router" [broker]="stagemesh-broker" \
    [stage]="stagemesh-prefill@ stagemesh-decode@")
for drop_in in "${@:2}"; do
    for service in ${services[${drop_in%%/*}]}; do
        install -D -m 644 "$here/examples/$drop_in" "$units/$service.service.d/${drop_in##*/}"
    done
done
echo "next: systemd-sysusers && systemd-tmpfiles --create stagemesh.conf && systemctl daemon-reload" >&2
