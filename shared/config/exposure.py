"""What a deployment shows to the network, and what that asks for. Pure.

Loopback and unix sockets are for this host. Whatever else listens needs TLS, the router API keys too, metrics and the
transfer engine a network of their own; `mesh.insecure` takes it all as it is.
"""

from __future__ import annotations

from collections.abc import Iterable

from stagemesh.shared.config.address import Address, is_loopback, parse_address
from stagemesh.shared.config.hosts import transfer_hosts
from stagemesh.shared.config.sections import Config, TlsSection
from stagemesh.shared.errors import Rejected

REMEDY = "or, on a network where nobody else is, set mesh.insecure = true"
_TLS = "set tls.cert_file, tls.key_file and tls.ca_file"


def check_exposure(config: Config, listeners: Iterable[tuple[str, Address]]) -> None:
    """`listeners` are all gRPC addresses, each with its key. Raises Rejected, naming the key and what to do."""
    _check_tls(config.tls)
    _check_nats_url(config.nats.url, insecure=config.mesh.insecure)
    if config.mesh.insecure:
        return
    if not config.tls.is_on:
        for field, address in listeners:
            if not address.is_private:
                raise Rejected(field, f"{address} can be reached from other hosts: {_TLS}, {REMEDY}")
    if not (parse_address(config.router.listen, "router.listen").is_private or config.auth.keys_file):
        said = f"{config.router.listen} can be reached from other hosts by anybody"
        raise Rejected("router.listen", f"{said}: set auth.keys_file (`stagemesh keys add` makes it), {REMEDY}")
    metrics = config.metrics
    if metrics.enabled and not (is_loopback(metrics.host) or metrics.private_network):
        said = "metrics are plain HTTP, and this host can be reached from others"
        remedy = "once only those reach it who may read them, set metrics.private_network = true"
        raise Rejected("metrics.host", f"{metrics.host}: {said}: {remedy}, {REMEDY}")
    for host in [] if config.transfer.private_network else sorted(transfer_hosts(config)):
        if not is_loopback(host):
            said = "the transfer engine asks nobody who he is, and this host can be reached from others"
            remedy = "once only hosts of the mesh reach its ports, set transfer.private_network = true"
            raise Rejected("transfer.host", f"{host}: {said}: {remedy}, {REMEDY}")


def _check_nats_url(url: str, *, insecure: bool) -> None:
    place = url.partition("://")[2]
    if "@" in place:
        raise Rejected("nats.url", "names a user or a password: a password goes into a file of nats.credentials_dir")
    host = place if place.endswith("]") else place.rpartition(":")[0] or place
    if url.startswith("nats://") and not (insecure or is_loopback(host)):
        raise Rejected("nats.url", f"{host} is another host, and nats:// is no TLS: use tls://, {REMEDY}")


def _check_tls(tls: TlsSection) -> None:
    for keys in (("cert_file", "key_file", "ca_file"), ("public_cert_file", "public_key_file")):
        given = [key for key in keys if getattr(tls, key)]
        if given and len(given) < len(keys):
            missing = next(key for key in keys if key not in given)
            raise Rejected(f"tls.{missing}", f"goes with tls.{given[0]}, and is missing")
    if not tls.is_on:
        for key in ("server_name", "public_cert_file", "public_client_ca_file"):
            if getattr(tls, key):
                raise Rejected(f"tls.{key}", "needs tls.cert_file, tls.key_file and tls.ca_file")
