"""The decode matrices against float64; that sums depend on no other row, and on no timing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from stagemesh.shared.model.cuda.matmul import MatmulWorkspace, linear_add_, norm_gate_up_silu, norm_linear
from stagemesh.shared.model.cuda.packing import Cut, fold_norm, pack

EPS = 1e-5
ROWS = (1, 3, 16, 64, 65, 128, 200)  # 200: two tiles of rows
SHAPES = ((512, 256), (1000, 520), (6144, 4096), (4096, 14336))
"""(columns, depth): small, uneven, and of a Mistral 7B."""
CUTS = (None, Cut(128, 64, 132), Cut(256, 64, 7))

Work = Callable[[Tensor], Tensor]


@pytest.fixture(scope="module")
def workspace() -> MatmulWorkspace:
    return MatmulWorkspace()


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).bfloat16()


def exact_norm(x: Tensor) -> Tensor:
    exact = x.double()
    scaled: Tensor = exact / (exact.square().mean(-1, keepdim=True) + EPS).sqrt()
    return scaled


def error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


def works(columns: int, depth: int, workspace: MatmulWorkspace) -> dict[str, Work]:
    """Each function with weights of its own; rows -> result."""
    scale = depth**-0.5
    one, two = pack(random(columns, depth, scale=scale)), pack(random(2 * columns, depth, scale=scale), paired=True)
    base = random(256, columns)
    return {
        "norm_linear": lambda x: norm_linear(x, one, EPS, workspace),
        "norm_gate_up_silu": lambda x: norm_gate_up_silu(x, two, EPS, workspace),
        "linear_add_": lambda x: linear_add_(x, one, base[: len(x)].clone(), workspace),
    }


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_results_are_near_the_exact_ones(shape: tuple[int, int], cut: Cut | None, workspace: MatmulWorkspace) -> None:
    columns, depth = shape
    one, two = random(columns, depth, scale=depth**-0.5), random(2 * columns, depth, scale=depth**-0.5)
    x, base = random(max(ROWS), depth, scale=3.0), random(max(ROWS), columns)
    normed, exact_one = exact_norm(x), one.double().T
    gate, up = (normed @ two.double().T).chunk(2, dim=-1)
    linear, gated = normed @ exact_one, silu(gate) * up
    added = base.double() + x.double() @ exact_one
    packed, pair = pack(one, cut=cut), pack(two, paired=True, cut=cut)
    for rows in ROWS:
        some = x[:rows]
        assert error(norm_linear(some, packed, EPS, workspace), linear[:rows]) < 5e-3
        assert error(norm_gate_up_silu(some, pair, EPS, workspace), gated[:rows]) < 5e-3
        assert error(linear_add_(some, packed, base[:rows].clone(), workspace), added[:rows]) < 5e-3
    assert not workspace.arrived.any()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_depends_on_itself_alone(shape: tuple[int, int], workspace: MatmulWorkspace) -> None:
    columns, depth = shape
    for name, work in works(columns, depth, workspace).items():
        for rows in (2, 64, 128):
            x = random(rows, depth)
            before = work(x)
            assert torch.equal(work(x), before), name
            others = random(rows, depth)
            others[rows // 2] = x[rows // 2]
            assert torch.equal(work(others)[rows // 2], before[rows // 2]), name
        x = random(64, depth)
        assert torch.equal(work(x)[:3], work(x[:3].contiguous())), name


def test_graphs_that_share_a_workspace_do_what_single_launches_do(workspace: MatmulWorkspace) -> None:
    """A chain in which each launch reads what the one before wrote, so that one that starts too early is seen."""
    hidden, inner, layers = 4096, 14336, 4
    weights = [
        (
            pack(fold_norm(random(hidden, hidden, scale=hidden**-0.5), 1 + random(hidden, scale=0.1))),
            pack(random(hidden, hidden, scale=hidden**-0.5)),
            pack(random(2 * inner, hidden, scale=hidden**-0.5), paired=True),
            pack(random(hidden, inner, scale=inner**-0.5)),
        )
        for _ in range(layers)
    ]

    def chain(x: Tensor, after: Callable[[], None]) -> Tensor:
        x = x.clone()
        for query, output, gate_up, down in weights:
            attended = norm_linear(x, query, EPS, workspace)
            after()
            linear_add_(attended, output, x, workspace)
            after()
            wide = norm_gate_up_silu(x, gate_up, EPS, workspace)
            after()
            linear_add_(wide, down, x, workspace)
            after()
        return x

    inputs = [random(rows, hidden) for rows in (64, 128, 5)]
    expected = [chain(x, torch.cuda.synchronize) for x in inputs]
    graphs, outputs = [], []
    for x in inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs.append(chain(x, lambda: None))
        graphs.append(graph)
    for _ in range(20):
        for output in outputs:
            output.fill_(float("nan"))
        for graph in graphs:
            graph.replay()
        assert all(torch.equal(output, exact) for output, exact in zip(outputs, expected, strict=True))
    assert not workspace.arrived.any()
