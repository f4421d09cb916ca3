"""The mesh on NIXL instead of Mooncake, KV and activations: the same tokens, and nothing left after a storm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mesh.test_aborts import SIXTY, check_storm
from tests.mesh.test_exact_tiny import CHUNK, PAGE, Shape, load_reference, run_shape
from tests.support.running import running_mesh
from tests.support.tiny_models import make_tiny

NIXL = ("--transfer", "nixl")


@pytest.mark.slow
def test_two_stages_to_two_give_the_tokens_of_the_reference(tmp_path: Path) -> None:
    run_shape(tmp_path, "llama", Shape(2, 2), count=40, options=NIXL)


@pytest.mark.full
@pytest.mark.parametrize("shape", [Shape(2, 2), Shape(3, 2), Shape(1, 2)], ids=str)
def test_more_shapes_give_the_tokens_of_the_reference(tmp_path: Path, shape: Shape) -> None:
    run_shape(tmp_path, "llama", shape, count=200, options=NIXL)


@pytest.mark.full
def test_a_storm_touches_nobody_else_and_leaves_nothing(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model", max_context=256)
    sizes = ["--page-size", str(PAGE), "--chunk-size", str(CHUNK), "--num-pages", "300", "--max-running", "12"]
    with running_mesh(tmp_path, "--model", str(model), "--dtype", "float64", *sizes, *NIXL) as mesh:
        check_storm(mesh, load_reference(model), SIXTY, seed=1)
