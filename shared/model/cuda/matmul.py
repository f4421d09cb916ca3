"""The matrices of a decode step, each in one launch with the norm before it and what comes after it.

norm_linear:        hidden --norm, matrix--> queries, keys and values, or logits
linear_add_:        attended, or the MLP's inner rows --matrix--> added to hidden
norm_gate_up_silu:  hidden --norm, two matrices, silu(gate) * up--> the MLP's inner rows

A norm's weights are folded into the matrix after it, at load: see `packing`. How a matrix is cut was measured and
nothing is tuned at run time, so every launch can be captured, and a row's result depends on that row alone and on
whether there are more than 64 of them.

`packed` multiplies with these, `layers` with cuBLAS: `tests/gpu/bench_matmul.py` sets the two side by side.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from stagemesh.shared.model.cuda.matmul_kernel import ADD, SILU, STORE, matmul
from stagemesh.shared.model.cuda.packing import PROCESSORS, PackedWeight, most_pieces

SHARED_BYTES: Final = 227 << 10  # of a multiprocessor, for one program
MOST_TILES: Final = 4096
PARTIAL_ELEMENTS: Final = 2 * PROCESSORS * 128 * 256  # two pieces of each program, of [rows, columns] of its tile
PIECE_COUNTS: Final = (1, 2, 3, 4, 6, 8, 12, 16)
"""Of pieces of a tile, to compile for."""


class MatmulWorkspace:
    """Sums of pieces of tiles, and counters that are zero between launches. For the launches of one stream.

    chained: a launch may start, and ask for its weights, before the kernel ahead of it has ended.
    """

    def __init__(self, device: torch.device | str = "cuda", *, chained: bool = True) -> None:
        self.chained = chained
        self.partials = torch.empty(PARTIAL_ELEMENTS, dtype=torch.float32, device=device)
        self.squares = torch.empty(PARTIAL_ELEMENTS // 128, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


def norm_linear(x: Tensor, weight: PackedWeight, eps: float, workspace: MatmulWorkspace) -> Tensor:
    """RMS norm and matrix: [M, N] of rows `x` [M, K] and `weight` [N, K], with the norm's weights folded in."""
    out = torch.empty(len(x), weight.columns, dtype=x.dtype, device=x.device)
    _launch(x, weight, out, workspace, STORE.value, eps)
    return out


def norm_gate_up_silu(x: Tensor, weight: PackedWeight, eps: float, workspace: MatmulWorkspace) -> Tensor:
    """RMS norm and silu(gate) * up: [M, N] of rows `x` [M, K] and the paired `weight`, norm's weights folded in."""
    out = torch.empty(len(x), weight.columns, dtype=x.dtype, device=x.device)
    _launch(x, weight, out, workspace, SILU.value, eps)
    return out


def linear_add_(x: Tensor, weight: PackedWeight, residual: Tensor, workspace: MatmulWorkspace) -> Tensor:
    """Adds to `residual` [M, N], in place, the product of rows `x` [M, K] and `weight` [N, K]; returns it."""
    _launch(x, weight, residual, workspace, ADD.value, None)
    return residual


def _launch(
    x: Tensor,
    weight: PackedWeight,
    out: Tensor,
    workspace: MatmulWorkspace,
    epilogue: int,
    eps: float | None,
) -> None:
    assert x.is_contiguous(), x.stride()
    assert out.is_contiguous(), out.stride()
    assert out.shape[1] == weight.columns, (out.shape, weight.columns)
    assert weight.paired == (epilogue == SILU.value)
    cut, parts = weight.cut, 2 if weight.paired else 1
    block_m = 64 if len(x) <= 64 else 128
    m_tiles = -(-len(x) // block_m)
    tiles = -(-weight.columns * parts // cut.width) * m_tiles
    warps = block_m // 16 if weight.paired else max(cut.warps, block_m // 16)
    k_units = -(-x.shape[1] // cut.depth)
    programs = min(cut.programs, tiles * k_units)  # so that each has a unit
    assert tiles <= MOST_TILES, (tiles, MOST_TILES)
    assert 2 * programs * block_m * cut.width <= PARTIAL_ELEMENTS, (cut, block_m)
    most = most_pieces(tiles, k_units, programs)
    assert most <= PIECE_COUNTS[-1], (cut, most)
    pieces = next(count for count in PIECE_COUNTS if count >= most)
    kernel: Any = matmul
    kernel[(programs,)](
        _descriptor(x, [block_m, cut.depth]),
        _descriptor(weight.units, [cut.width, cut.depth]),
        out,
        workspace.partials,
        workspace.squares,
        workspace.arrived,
        len(x),
        weight.columns,
        x.shape[1],
        0.0 if eps is None else eps,
        EPILOGUE=epilogue,
        NORM=eps is not None,
        STAGES=SHARED_BYTES // ((cut.width + block_m) * cut.depth * 2 + 256),
        M_TILES=m_tiles,
        PIECES=pieces,
        PART=min(128, cut.width // parts, 1 << (4096 * warps // (block_m * parts * pieces)).bit_length() - 1),
        num_warps=warps,
        launch_pdl=workspace.chained,
    )


def _descriptor(tensor: Tensor, block: list[int]) -> Any:
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor.from_tensor(tensor, block, layout)
