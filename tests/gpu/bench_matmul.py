"""The matrices of a decode step on this card, against cuBLAS with flashinfer's norms and activation.

python tests/gpu/bench_matmul.py [--shapes o down] [--rows 1 64 128] [--sweep-seconds 60]

Times are of one launch among many in a CUDA graph, over copies of the weights that together are larger than the cache;
"alone": each starts only once the one before it has ended.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from flashinfer.activation import silu_and_mul
from flashinfer.norm import fused_add_rmsnorm
from torch import Tensor
from torch.nn.functional import linear

from stagemesh.shared.model.cuda.matmul import MatmulWorkspace, linear_add_, norm_gate_up_silu, norm_linear
from stagemesh.shared.model.cuda.packing import Cut, PackedWeight, cut_for, pack

EPS, COPIES, CALLS, LAYERS = 1e-5, 6, 24, 6
HIDDEN, INNER, VOCAB, QKV = 4096, 14336, 32768, 6144


@dataclass(frozen=True)
class Shape:
    """`columns` and `depth` of the weights; `kind`: the function that multiplies with them."""

    name: str
    columns: int
    depth: int
    kind: str


SHAPES = (
    Shape("qkv", QKV, HIDDEN, "norm"),
    Shape("o", HIDDEN, HIDDEN, "add"),
    Shape("gate_up", 2 * INNER, HIDDEN, "silu"),
    Shape("down", HIDDEN, INNER, "add"),
    Shape("lm_head", VOCAB, HIDDEN, "norm"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=[shape.name for shape in SHAPES])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 16, 32, 64, 128])
    parser.add_argument("--sweep-seconds", type=float, default=0)
    options = parser.parse_args()
    ceiling()
    until = time.monotonic() + options.sweep_seconds
    for shape in (shape for shape in SHAPES if shape.name in options.shapes):
        weights, size = [random(shape.columns, shape.depth) for _ in range(COPIES)], shape.columns * shape.depth * 2
        cut = packs(shape, weights, cut_for(shape.columns))
        for rows in options.rows:
            base, took = timed(cublas(shape, weights, rows)), timed(ours(shape, cut, rows, MatmulWorkspace()))
            alone = timed(ours(shape, cut, rows, MatmulWorkspace(chained=False)))
            print(
                f"{shape.name:8} M {rows:3}: cublas {base:6.1f} us ({size / base / 1e6:.2f} TB/s), "
                f"ours {took:6.1f} us ({size / took / 1e6:.2f} TB/s), alone {alone:6.1f} us",
                flush=True,
            )
        del cut
        for candidate in cuts(shape.columns):
            if time.monotonic() < until:
                sweep(shape, weights, candidate)
    for rows in options.rows:
        layers(rows)


def cuts(columns: int) -> Iterator[Cut]:
    for width, depth in ((256, 64), (128, 128), (128, 64), (64, 128)):
        tiles = -(-columns // width)
        for programs in sorted({132, 132 // tiles * tiles} - {0}):
            yield from (Cut(width, depth, programs, warps) for warps in (4, 8))


def sweep(shape: Shape, weights: list[Tensor], cut: Cut) -> None:
    packed = packs(shape, weights, cut)
    for rows in (64, 128):
        took = timed(ours(shape, packed, rows, MatmulWorkspace()))
        print(f"    {shape.name} M {rows}, {cut}: {took:.1f} us", flush=True)


def packs(shape: Shape, weights: list[Tensor], cut: Cut) -> list[PackedWeight]:
    return [pack(weight, paired=shape.kind == "silu", cut=cut) for weight in weights]


def ours(shape: Shape, weights: list[PackedWeight], rows: int, workspace: MatmulWorkspace) -> Callable[[int], object]:
    x, residual = random(rows, shape.depth), random(rows, shape.columns)

    return {
        "norm": lambda i: norm_linear(x, weights[i], EPS, workspace),
        "silu": lambda i: norm_gate_up_silu(x, weights[i], EPS, workspace),
        "add": lambda i: linear_add_(x, weights[i], residual, workspace),
    }[shape.kind]


def cublas(shape: Shape, weights: list[Tensor], rows: int) -> Callable[[int], object]:
    x, hidden, norm = random(rows, shape.depth), random(rows, shape.depth), random(shape.depth)
    delta = random(rows, shape.depth)

    def normed(i: int) -> Tensor:
        fused_add_rmsnorm(delta, hidden, norm, EPS)
        return linear(delta, weights[i])

    return {
        "norm": normed,
        "silu": lambda i: silu_and_mul(normed(i)),
        "add": lambda i: linear(x, weights[i]),
    }[shape.kind]


def layers(rows: int) -> None:
    """Whole layers but for attention and rotation: with cuBLAS, with our kernels, and with some of each."""
    plain = [
        [random(QKV, HIDDEN), random(HIDDEN, HIDDEN), random(2 * INNER, HIDDEN), random(HIDDEN, INNER)]
        for _ in range(LAYERS)
    ]
    norm, hidden, attended = random(HIDDEN), random(rows, HIDDEN), random(rows, HIDDEN)
    size = 2 * HIDDEN * (QKV + HIDDEN + 3 * INNER)

    def usual(i: int) -> None:
        qkv, output, gate_up, down = plain[i]
        delta = attended
        fused_add_rmsnorm(delta, hidden, norm, EPS)
        linear(delta, qkv)
        delta = linear(attended, output)
        fused_add_rmsnorm(delta, hidden, norm, EPS)
        linear(silu_and_mul(linear(delta, gate_up)), down)

    def told(name: str, work: Callable[[int], object]) -> None:
        took = timed(work, LAYERS)
        print(f"a layer without attention, M {rows}, {name}: {took:.1f} us ({size / took / 1e6:.2f} TB/s)", flush=True)

    told("cublas", usual)
    packed = [[pack(q), pack(o), pack(g, paired=True), pack(d)] for q, o, g, d in plain]

    def ours(workspace: MatmulWorkspace, i: int) -> None:
        qkv, output, gate_up, down = packed[i]
        norm_linear(hidden, qkv, EPS, workspace)
        linear_add_(attended, output, hidden, workspace)
        wide = norm_gate_up_silu(hidden, gate_up, EPS, workspace)
        linear_add_(wide, down, hidden, workspace)

    def mixed(workspace: MatmulWorkspace, i: int) -> None:
        qkv, _, gate_up, _ = packed[i]
        norm_linear(hidden, qkv, EPS, workspace)
        hidden.addmm_(attended, plain[i][1].T)
        hidden.addmm_(norm_gate_up_silu(hidden, gate_up, EPS, workspace), plain[i][3].T)

    def half(workspace: MatmulWorkspace, i: int) -> None:
        qkv, _, gate_up, down = packed[i]
        norm_linear(hidden, qkv, EPS, workspace)
        hidden.addmm_(attended, plain[i][1].T)
        wide = norm_gate_up_silu(hidden, gate_up, EPS, workspace)
        linear_add_(wide, down, hidden, workspace)

    told("ours alone", partial(ours, MatmulWorkspace(chained=False)))
    told("ours", partial(ours, MatmulWorkspace()))
    told("ours but for o", partial(half, MatmulWorkspace()))
    told("ours where a norm is", partial(mixed, MatmulWorkspace()))


def ceiling() -> None:
    """The rate at which the card copies, and at which it only reads."""
    data = [torch.zeros(1 << 29, dtype=torch.float32, device="cuda").normal_() for _ in range(2)]
    copy = timed(lambda i: data[0].copy_(data[1]), 1, 4)
    read = timed(lambda i: data[i % 2].sum(), 2, 4)
    size = data[0].nbytes
    print(f"copy {2 * size / copy / 1e6:.2f} TB/s, read {size / read / 1e6:.2f} TB/s", flush=True)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * shape[-1] ** -0.5


def timed(work: Callable[[int], object], copies: int = COPIES, calls: int = CALLS) -> float:
    """Microseconds of one call of many in a graph."""
    work(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            work(call % copies)
    return replayed(graph) / calls


def replayed(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds; the median of nine replays."""
    graph.replay()
    times = []
    for _ in range(9):
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        graph.replay()
        done.record()
        done.synchronize()
        times.append(begun.elapsed_time(done) * 1e3)
    return median(times)


if __name__ == "__main__":
    main()
