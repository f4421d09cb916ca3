"""The example deployments: configs that load, and units that are where the config's addresses say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stagemesh.shared.config import load_config, parse_address
from stagemesh.shared.config.hosts import mesh_hosts
from stagemesh.shared.runtime.plan import find_process, parse_stage
from tests.support.mesh import ROOT
from tests.support.units import DEPLOY

EXAMPLES = sorted((ROOT / "deploy" / "examples").glob("*.toml"))


def units_by_host(path: Path) -> dict[str, list[str]]:
    lines = re.findall(r"^#   (\S+)  (\S.*)$", path.read_text(), re.MULTILINE)
    return {host: units.split() for host, units in lines}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_stage_of_an_example_has_its_unit_on_its_host(path: Path) -> None:
    config, hosts = load_config(path, {}), units_by_host(path)
    assert set(hosts) == mesh_hosts(config)
    assert len(hosts) > 1
    placed = {}
    for host, units in hosts.items():
        for unit in units:
            name, at, stage = unit.partition("@")
            assert (DEPLOY / f"stagemesh-{name}{at}.service").is_file(), unit
            if at:
                spec = find_process(config, "prefill" if name == "prefill" else "decode", *parse_stage(stage))
                assert parse_address(spec.address, "stages").host == host, unit
            placed[unit] = host
    assert len([unit for unit in placed if "@" in unit]) == config.num_stages
    assert placed["broker"] == parse_address(config.broker.listen, "broker.listen").host
    assert placed["nats"] in config.nats.url
    assert "router" in placed
