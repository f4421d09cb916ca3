"""Router and broker need nothing of what stages compute with, and each extra brings what it is for."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

from tests.support.mesh import ROOT

HEAVY = ("torch", "transformers", "accelerate", "flashinfer", "triton", "cuda", "mooncake", "nixl", "smg_grpc_proto")
"""By the name they are imported with."""
BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {heavy!r}:
            raise ImportError(name + " is not installed here")

sys.meta_path.insert(0, Blocked())
from stagemesh.shared.runtime.plan import ENTRIES, load_entry
from stagemesh.shared.model.source import open_model
{then}
"""


def run_without_heavy(then: str) -> subprocess.CompletedProcess[str]:
    script = BLOCKED.format(heavy=HEAVY, then=then)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("service", ["router", "broker"])
def test_a_service_that_computes_nothing_imports_without_torch(service: str) -> None:
    done = run_without_heavy(f"load_entry(ENTRIES[{service!r}])")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_router_reads_the_model_and_its_tokenizer_without_torch() -> None:
    done = run_without_heavy("print(len(open_model('smollm2').tokenizer().encode('Once upon a time')))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "4\n", "")


def test_a_stage_does_need_it() -> None:
    done = run_without_heavy("load_entry(ENTRIES['decode'])")
    assert "torch is not installed here" in done.stderr


def test_what_every_install_brings_has_no_torch_and_each_extra_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {need.partition(">")[0] for need in project["dependencies"]}
    assert not {name for name in names if name.startswith(("torch", "mooncake", "nixl", "flashinfer"))}
    extras = project["optional-dependencies"]
    assert {"cpu", "cu12", "cu13", "nixl", "openai"} <= set(extras)
    engines = {extra: [n for n in extras[extra] if n.startswith("mooncake")] for extra in ("cpu", "cu12", "cu13")}
    assert all(len(found) == 1 for found in engines.values()), engines
