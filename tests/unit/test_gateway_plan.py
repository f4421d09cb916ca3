"""How the gateway is started, and when it is not."""

from __future__ import annotations

import socket
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stagemesh.shared.config import Config, build_config
from stagemesh.shared.config.local import LocalLayout, local_document
from stagemesh.shared.config.sections import ModelSection
from stagemesh.shared.errors import Rejected
from stagemesh.shared.runtime.gateway_plan import (
    gateway_arguments,
    gateway_place,
    gateway_process,
    usable_port,
)


def config_of(port: int | None = 0, **tables: dict[str, Any]) -> Config:
    document = local_document(LocalLayout(port=8470), Path("/run/mesh"))
    for name, table in tables.items():
        document[name] = {**document.get(name, {}), **table}
    options = {} if port is None else {"openai.port": port}
    return build_config(document, source="here", environ={}, options=options)


def test_nothing_listens_beyond_this_host_and_nothing_is_tried_again() -> None:
    config = config_of()
    place = gateway_place(config)
    options = list(gateway_arguments(config, place))
    pairs = dict(pairwise(options))
    assert (pairs["--host"], pairs["--prometheus-host"]) == ("127.0.0.1", "127.0.0.1")
    assert pairs["--worker-urls"] == "grpc://127.0.0.1:8470"
    assert int(pairs["--port"]) == place.port > 0 < place.metrics_port == int(pairs["--prometheus-port"])
    assert {"--disable-retries", "--disable-circuit-breaker"} <= set(options)
    assert int(pairs["--max-payload-size"]) > 6 * config.router.max_text_bytes


def test_a_router_that_listens_everywhere_is_called_here() -> None:
    config = config_of(mesh={"insecure": True}, router={"listen": "0.0.0.0:8470"})
    assert gateway_place(config).router == "127.0.0.1:8470"


def test_a_port_that_is_taken_is_refused_by_name() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Rejected, match=rf"openai\.port: cannot listen on 127\.0\.0\.1:{port}"):
            usable_port(port, "127.0.0.1", "openai.port")


def test_there_is_none_unless_it_is_asked_for() -> None:
    assert gateway_process(config_of(None)) is None
    assert (spec := gateway_process(config_of(8000))) is not None
    assert (spec.name, spec.address) == ("openai", "127.0.0.1:8000")
    with pytest.raises(Rejected, match=r"openai\.port: is not set"):
        gateway_place(config_of(None))


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"auth": {"keys_file": "/k"}}, r"openai\.port: cannot be had with auth\.keys_file"),
        ({"tls": {"cert_file": "/c", "key_file": "/k", "ca_file": "/a"}}, r"openai\.port: cannot be had with tls"),
        ({"router": {"listen": "unix:/r"}}, r"openai\.port: needs a router that listens at host:port"),
    ],
)
def test_what_it_cannot_stand_before_is_refused(tables: dict[str, Any], says: str) -> None:
    with pytest.raises(Rejected, match=says):
        config_of(**tables)


def test_under_an_init_system_the_router_needs_a_port() -> None:
    with pytest.raises(Rejected, match=r"router\.listen: port 0 is for `stagemesh up`"):
        gateway_place(config_of(router={"listen": "127.0.0.1:0"}))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("smollm2", "smollm2"),
        ("/models/Qwen2.5-0.5B", "Qwen2.5-0.5B"),
        ("/models/SmolLM2.Q4_1.gguf", "SmolLM2.Q4_1"),
        ("dummy:/shapes/mistral-7b", "mistral-7b"),
    ],
)
def test_clients_call_the_model_by_the_last_part_of_its_path(path: str, name: str) -> None:
    assert ModelSection(path=path).served_name == name
