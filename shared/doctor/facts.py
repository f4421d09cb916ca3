"""The facts of this host, as its kernel, its libraries and its neighbours tell them. Looks, and changes nothing."""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from stagemesh.shared.config import Config
from stagemesh.shared.doctor.secrets import Secret, look_at_passwords, look_at_secrets
from stagemesh.shared.errors import StagemeshError
from stagemesh.shared.runtime.preflight import port_state

ASK_TIMEOUT_S: Final = 10.0
MODULES: Final = {
    "torch": ("torch",),
    "mooncake.engine": (
        "mooncake-transfer-engine-non-cuda",
        "mooncake-transfer-engine-cuda13",
        "mooncake-transfer-engine",
    ),
    "nixl._api": ("nixl",),
    "smg": ("smg",),
    "smg_grpc_proto": ("smg-grpc-proto",),
    "opentelemetry.sdk.trace.export": ("opentelemetry-sdk",),
    "opentelemetry.exporter.otlp.proto.grpc.trace_exporter": ("opentelemetry-exporter-otlp-proto-grpc",),
}
"""What may be imported, and the distributions that bring it."""
LIBRARIES: Final = ("libibverbs.so.1", "librdmacm.so.1", "libnuma.so.1")
TIMEX_BYTES: Final = 256  # struct timex is smaller
TIME_ERROR: Final = 5  # adjtimex(2): the clock is not synchronised


@dataclass(frozen=True, slots=True)
class Module:
    """Whether it can be imported; `said` is its version, or why not."""

    works: bool
    said: str


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Listen:
    """`state` is free, in use, elsewhere, or what is wrong with the address."""

    address: str
    state: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What belongs to a deployment is empty without one. `memlock_bytes` None: no limit."""

    python: tuple[int, ...]
    modules: Mapping[str, Module]
    torch_cuda: str
    libraries: Mapping[str, bool]
    gpus: tuple[Gpu, ...]
    rdma: tuple[tuple[str, str], ...]
    memlock_bytes: int | None
    open_files: int
    clock_synchronised: bool | None
    memory_bytes: int
    nats_server: str
    nats_answers: bool = False
    listens: Mapping[str, Listen] = field(default_factory=dict)
    model_error: str = ""
    needed_bytes: int | None = None
    run_dir_error: str = ""
    secrets: tuple[Secret, ...] = ()


def collect(config: Config | None) -> Facts:
    """Takes some seconds: it imports torch, and asks the bus."""
    from stagemesh.shared.model.memory import available_memory

    modules = {name: _import(name, packages) for name, packages in MODULES.items()}
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Facts(
        python=tuple(sys.version_info[:3]),
        modules=modules,
        torch_cuda=_torch_cuda() if modules["torch"].works else "",
        libraries={name: _loads(name) for name in LIBRARIES},
        gpus=_gpus(),
        rdma=_rdma(Path("/sys/class/infiniband")),
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        clock_synchronised=_clock_synchronised(),
        memory_bytes=available_memory(),
        nats_server=_said(_nats_server)[0],
        **({} if config is None else _of_deployment(config, can_compute=modules["torch"].works)),
    )


def _of_deployment(config: Config, *, can_compute: bool) -> dict[str, Any]:
    from stagemesh.shared.config.check import addresses

    listens = {name: Listen(str(address), port_state(address)) for name, address in addresses(config)}
    to_start = [name for name, listen in listens.items() if listen.state == "free"]  # what runs has its memory
    model, model_error = _model(config)
    needed = None
    if model is not None and can_compute and config.model.device == "cpu":
        from stagemesh.shared.doctor.need import needed_bytes

        needed = needed_bytes(config, model, to_start)
    return {
        "listens": listens,
        "nats_answers": _nats_answers(config.nats.url),
        "model_error": model_error,
        "needed_bytes": needed,
        "run_dir_error": _run_dir_error(Path(config.mesh.run_dir), is_made=not config.nats.url),
        "secrets": tuple(_secrets(config, listens)),
    }


def _import(name: str, packages: tuple[str, ...]) -> Module:
    try:
        import_module(name)
    except Exception as error:
        return Module(False, str(error).partition("\n")[0])
    for package in packages:
        try:
            return Module(True, version(package))
        except PackageNotFoundError:
            continue
    return Module(True, "of unknown version")


def _torch_cuda() -> str:
    import torch

    return torch.version.cuda or ""


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _gpus() -> tuple[Gpu, ...]:
    query = ["nvidia-smi", "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_gpus(done.stdout) if done.returncode == 0 else ()


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Lines of `index, name, MiB`."""
    rows = (line.split(", ") for line in text.splitlines())
    return tuple(Gpu(int(row[0]), row[1], int(row[2]) << 20) for row in rows if len(row) == 3 and row[0].isdecimal())


def _rdma(folder: Path) -> tuple[tuple[str, str], ...]:
    """(device/port, state) such as ("mlx5_0/1", "4: ACTIVE")."""
    states = sorted(folder.glob("*/ports/*/state"))
    return tuple((f"{path.parts[-4]}/{path.parts[-2]}", path.read_text().strip()) for path in states)


def _clock_synchronised() -> bool | None:
    timex = ctypes.create_string_buffer(TIMEX_BYTES)  # all zero: adjtimex only reads
    state = ctypes.CDLL(None, use_errno=True).adjtimex(timex)
    return None if state < 0 else state != TIME_ERROR


def _nats_server() -> str:
    from stagemesh.shared.runtime.nats_server import find_nats_server

    return find_nats_server()


def _nats_answers(url: str) -> bool:
    from stagemesh.shared.runtime.nats_service import DEFAULT_PORT, answers

    parts = urlsplit(url)
    return bool(parts.hostname) and asyncio.run(answers(parts.hostname or "", parts.port or DEFAULT_PORT))


def _model(config: Config) -> tuple[Any, str]:
    from stagemesh.shared.model.source import open_model

    return _said(lambda: open_model(config.model.spec))


def _said(ask: Callable[[], Any]) -> tuple[Any, str]:
    """The answer, or what was said instead of one."""
    try:
        return ask(), ""
    except (StagemeshError, OSError) as error:
        return None, str(error)


def _secrets(config: Config, listens: Mapping[str, Listen]) -> Iterator[Secret]:
    here = [name for name, listen in listens.items() if listen.state in ("free", "in use")]
    yield from look_at_secrets(config, here)
    if (passwords := look_at_passwords(config)) is not None:
        yield passwords


def _run_dir_error(path: Path, *, is_made: bool) -> str:
    """`is_made`: `stagemesh up` makes it, and what is above it."""
    while is_made and not path.exists():
        path = path.parent
    if not path.is_dir():
        return f"{path} does not exist"
    return "" if os.access(path, os.W_OK | os.X_OK) else f"{path} cannot be written by this user"
