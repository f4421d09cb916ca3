"""What `up` finds out before it starts anything: packages that are missing, ports that somebody has."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stagemesh.shared.config import Config, build_config
from stagemesh.shared.config.local import LocalLayout, local_document
from stagemesh.shared.errors import Rejected
from stagemesh.shared.runtime import preflight
from stagemesh.shared.runtime.preflight import check_engine, check_gateway, check_ports


def config_of(options: dict[str, Any] | None = None) -> Config:
    document = local_document(LocalLayout(port=0), Path("/run/mesh"))
    return build_config(document, source="here", environ={}, options=options or {})


@contextmanager
def taken() -> Iterator[int]:
    """A port of loopback at which somebody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("field", "value"),
    [("openai.port", "{port}"), ("router.listen", "127.0.0.1:{port}"), ("broker.listen", "localhost:{port}")],
)
def test_every_port_of_a_mesh_is_looked_at_before_the_start(field: str, value: str) -> None:
    with taken() as port:
        given = config_of({field: int(port) if field == "openai.port" else value.format(port=port)})
        with pytest.raises(Rejected, match=rf"{field}: cannot listen on .*:{port}: Address already in use"):
            check_ports(given)
    check_ports(given)


def test_what_is_not_installed_is_named_if_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    check_gateway(config_of({"openai.port": 0}))
    monkeypatch.setattr(preflight, "GATEWAY", ("smg", "no_such_package"))
    check_gateway(config_of())
    with pytest.raises(Rejected, match=r"openai\.port: needs no_such_package: pip install 'stagemesh\[openai\]'"):
        check_gateway(config_of({"openai.port": 0}))


def test_a_transfer_engine_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in ("mooncake", "memory"):
        check_engine(config_of({"transfer.backend": backend}))
    monkeypatch.setattr(preflight, "ENGINES", {"nixl": ("no_such_package", "nixl")})
    with pytest.raises(
        Rejected, match=r"transfer\.backend: no_such_package is not installed: stagemesh\[nixl\] brings"
    ):
        check_engine(config_of({"transfer.backend": "nixl"}))
