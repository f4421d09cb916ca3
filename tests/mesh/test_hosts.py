"""The four-host example as its units, unchanged but for the model, on four hosts of a network of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mesh.test_exact_tiny import load_reference, prompts
from tests.support.hosts import Network, network
from tests.support.mesh import ROOT
from tests.support.reference import check_greedy
from tests.support.tiny_models import make_tiny
from tests.support.unit_mesh import unit_host
from tests.unit.test_examples import units_by_host

pytestmark = pytest.mark.full
EXAMPLE = ROOT / "deploy" / "examples" / "four-hosts.toml"
NEW_TOKENS = 24


def config_with(model: Path) -> str:
    """The pool of the example is for hosts with more memory."""
    text = EXAMPLE.read_text().replace("/srv/models/mistral-7b-instruct", str(model))
    text = re.sub("pool_bytes = .*", "num_pages = 400", text)
    return text.replace('dtype = "bfloat16"', 'dtype = "float64"')


def ask(net: Network, client: str, router: str, token_ids: list[int]) -> list[int]:
    """The answer, asked for from host `client`."""
    script = (
        "import asyncio, json, sys\n"
        "from tests.support.client import GENERATOR, generate, token_request\n"
        "from stagemesh.shared.rpc.client import Client\n"
        "async def main():\n"
        "    async with Client(sys.argv[1], GENERATOR) as client:\n"
        "        request = token_request(json.loads(sys.argv[2]), int(sys.argv[3]), ignore_eos=True)\n"
        "        return (await generate(client, request)).token_ids\n"
        "print(json.dumps(asyncio.run(main())))\n"
    )
    command = [*net.on(client), sys.executable, "-c", script, router, json.dumps(token_ids), str(NEW_TOKENS)]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / '.ns'}:{ROOT}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    answer: list[int] = json.loads(done.stdout)
    return answer


def test_pipelines_over_four_hosts_give_the_tokens_of_the_reference(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model", num_layers=8, max_context=256)
    reference = load_reference(model)
    hosts = units_by_host(EXAMPLE)
    wanted = prompts(12, reference.config.vocab_size)[6:]
    with network(list(hosts)) as net, unit_host(tmp_path / "r", config_with(model)) as units:
        for host, names in hosts.items():
            for name in names:
                units.start(f"stagemesh-{name}.service", net.on(host))
        every = tuple(units.running)
        units.until("READY", *every)
        answers = [ask(net, "10.20.0.4", "10.20.0.1:8470", prompt) for prompt in wanted]
        for role in ("router", "@", "broker", "nats"):
            names = [name for name in every if role in name]
            units.terminate(*names)
            units.until("STOPPING", *names)
            units.wait(*names)
    compared = [check_greedy(reference, prompt, made) for prompt, made in zip(wanted, answers, strict=True)]
    assert [len(made) for made in answers] == [NEW_TOKENS] * len(wanted)
    assert sum(compared) > 0.9 * NEW_TOKENS * len(wanted)
