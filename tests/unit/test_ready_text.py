"""The command that `up` suggests works as it stands, where the config tells all that it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stagemesh.shared.config import build_config
from stagemesh.shared.config.local import LocalLayout, local_document
from stagemesh.shared.runtime.ready import ready_text

TLS = {"cert_file": "/c.pem", "key_file": "/c.key", "ca_file": "/ca.pem"}
PUBLIC = {"public_cert_file": "/p.pem", "public_key_file": "/p.key"}


@pytest.mark.parametrize(
    ("tables", "command"),
    [
        ({}, "stagemesh generate --router"),
        ({"tls": TLS}, "stagemesh --ca-file /ca.pem generate --router"),
        ({"auth": {"keys_file": "/keys"}}, "stagemesh --api-key-file KEYFILE generate --router"),
        ({"tls": {**TLS, **PUBLIC}}, "stagemesh --ca-file CA generate --router"),
        (
            {"tls": {**TLS, "public_client_ca_file": "/a"}, "auth": {"keys_file": "/keys"}},
            "stagemesh --ca-file /ca.pem --cert-file CERT --key-file KEY --api-key-file KEYFILE generate --router",
        ),
    ],
)
def test_the_suggested_command_has_what_the_router_asks_for(tables: dict[str, Any], command: str) -> None:
    document = {**local_document(LocalLayout(), Path("/run/stagemesh")), **tables}
    text = ready_text(build_config(document, source="the test", environ={}))
    assert f"  try:  {command} 127.0.0.1:8470 --chat" in text
