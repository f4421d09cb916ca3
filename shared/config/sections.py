"""The shape of a deployment's config: one struct a section, with defaults and the ranges of single values.

All are immutable, and a key that is not declared is an error. What concerns several values at once is in `check`. Every
number says its unit in its name; a size in tokens or pages says so in its comment.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Literal

from msgspec import Meta, Struct

from stagemesh.shared.errors import Rejected

MIB = 1 << 20
Role = Literal["prefill", "decode"]
Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,39}$")]
"""A part of NATS subjects and of socket names."""
Count = Annotated[int, Meta(ge=1, le=1 << 31)]
PpSize = Annotated[int, Meta(ge=1, le=64)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]

FilePath = str
"""An absolute path, or `credential:NAME` for a credential of the systemd unit."""


class MeshSection(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`run_dir` is an absolute path: unix sockets, the NATS store and the effective config lie there. Stages and broker
    listen at the addresses that others are told; where that cannot be (translated addresses), at `listen_host`.
    `insecure` takes what the network can reach without TLS, or the Generate API without keys."""

    name: Name = "local"
    run_dir: str
    listen_host: str = ""  # such as 0.0.0.0; empty: what each address says
    insecure: bool = False


class NatsSection(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`url` may be empty only under `stagemesh up`, which then starts a server of its own. `credentials_dir` has a file
    for each role (stage, broker, router, admin, observer) with its password, which is all that it has; a process
    reads its own."""

    url: str = ""
    connect_timeout_s: Seconds = 5.0
    credentials_dir: FilePath = ""


class BrokerSection(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`listen` is `unix:/path` or `host:port`. One that has just started waits up to `rejoin_s` for instances of the
    deployment: a ticket whose other side has not come back by then fails.

    A prefill instance with a write in doubt is started again, which alone frees the pages at the other end: at once if
    another of its role serves, else once it is idle, or its pages in doubt are more than `max_doubtful_share` of a
    decode instance's."""

    listen: str
    rejoin_s: Seconds = 5.0
    max_doubtful_share: Annotated[float, Meta(ge=0, le=1)] = 0.1  # 1: the only one is never ended while it is busy


class RouterSection(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The public face. Port 0 in `listen` means any free port.

    A request waits until its first token. What is over the limits of waiting ends RESOURCE_EXHAUSTED, at once or when
    its time is over; one that has had its first token is never ended by them. Every one that waits costs its prompt in
    the router and in a prefill head, so `max_waiting_requests` is what bounds their memory in a flood."""

    listen: str = "127.0.0.1:8470"
    max_text_bytes: Annotated[int, Meta(ge=1, le=32 * MIB)] = MIB
    max_live_requests: Count = 4096  # those that wait, and those whose answers are under way
    max_waiting_requests: Count = 1024
    max_waiting_s: Seconds = 600.0  # longer than a client without a deadline should ever be kept without a word
    default_max_tokens: Count | None = None  # None: what is left of the context
    # those sent off without a first token yet, for each prefill instance; the others wait their turn among API keys.
    # None: twice engine.max_prefill_sequences
    max_ahead_requests: Count | None = None
    broker_wait_s: Seconds = 15.0  # that a request waits for a ticket while the broker is away; then UNAVAILABLE
    max_attempts: Count = 3  # of a request whose instances are lost; those for want of memory are not counted


class ModelSection(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`path` is `smollm2`, a Hugging Face directory, a GGUF file or `dummy:PATH`. `seed` is for dummy weights."""

    path: Annotated[str, Meta(min_length=1)]
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    device: Literal["cpu", "cuda"] = "cpu"

    @property
    def served_name(self) -> str:
        """What OpenAI clients call it: the last part of its path."""
        path = self.path.removeprefix("dummy:")
        return PurePath(path).name.removesuffix(".gguf") or path

    @property
    def spec(self) -> str:
        """What `open_model` takes: the path, with the seed if the weights are made of it."""
        return f"{self.path}#{self.seed}" if self.path.startswith("dummy:") else self.path


class OpenaiSection(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A gateway in front of the router that speaks OpenAI's HTTP, at a loopback port. Port 0 means any free port. Needs
    stagemesh[openai]; `stagemesh up` starts it."""

    port: Annotated[int, Meta(ge=0, le=65535)] | None = None  # None: none


class EngineSection(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes of every instance. Without `num_pages` they follow from `pool_bytes`, which is per stage."""

    page_size: Annotated[int, Meta(ge=1, le=1024)] = 16  # tokens
    chunk_size: Annotated[int, Meta(ge=1, le=1 << 20)] = 256  # prompt tokens of a prefill step
    # of a prefill step when there is little to do: a prompt that comes alone is cut into steps that keep all stages at
    # work. None: a quarter of chunk_size
    min_chunk_size: Count | None = None
    num_pages: Count | None = None
    pool_bytes: Annotated[int, Meta(ge=MIB, le=1 << 42)] = 512 * MIB
    max_running: Annotated[int, Meta(ge=1, le=1 << 16)] = 64  # sequences of a decode instance
    max_prefill_sequences: Annotated[int, Meta(ge=1, le=1 << 16)] = 64  # sequences packed into a chunk
    cuda_graphs: bool = True
    run_ahead: Annotated[int, Meta(ge=0, le=8)] = 1  # steps of a microbatch issued before their predecessor is back
    late_issue: bool = True  # on GPUs, while prompts are about to join: a step that runs ahead waits for them
    extra_depth: Annotated[int, Meta(ge=0, le=8)] = 0  # microbatches beyond one a stage
    reserve_ahead: Annotated[int, Meta(ge=0, le=1024)] = 2  # requests a prefill head asks pages for in advance
    ring_slots: Annotated[int, Meta(ge=2, le=1024)] | None = None  # None: from stages, extra_depth and run_ahead
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0  # torch threads of a stage; 0: the host's cores shared out
    decode_nice: Annotated[int, Meta(ge=0, le=19)] = 5  # decode's forward passes yield cores that prefill shares
    host_kv_bytes: Annotated[int, Meta(ge=0, le=1 << 46)] = 512 * MIB  # a decode stage's, for KV of retracted sequences
    schedule_conservativeness: Annotated[float, Meta(ge=0, le=10)] = 1.0  # of the expected growth that decode admits by
    prefix_cache: bool = True  # a prefill instance keeps the KV of finished prompts in pages that nobody needs
    priority_ageing_s: Seconds = 10.0  # waiting that is worth one point of a request's priority
    # where both share GPUs: decode holds its steps while prompts for it are being computed, at most so long
    decode_yield_s: Annotated[float, Meta(ge=0, le=60)] = 0.0
    drain_timeout_s: Seconds = 30.0


class TransferSection(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How KV pages and activations travel. `host` is the address that peers are told, empty for the host of the stage's
    own address, which differs from host to host. The engine's ports ask nobody who he is: `private_network` says that
    only hosts of the mesh reach them, which a host off loopback needs."""

    backend: Literal["mooncake", "nixl", "memory"] = "mooncake"
    # auto: GPU to GPU in one host; over several, RDMA for GPUs where there is a card; else TCP
    protocol: Literal["auto", "tcp", "intranode", "rdma"] = "auto"
    host: str = ""
    private_network: bool = False
    max_batch_bytes: Annotated[int, Meta(ge=4096, le=1 << 30)] = 16 * MIB
    max_batch_pieces: Annotated[int, Meta(ge=1, le=1 << 16)] = 256
    io_threads: Annotated[int, Meta(ge=1, le=64)] = 2
    kv_checksum: bool = False  # every piece is summed by its writer, and verified where it arrives, before it is used


class MetricsSection(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a process serves its Prometheus metrics, at /metrics. Port 0 means any free port, which its log tells;
    under `stagemesh up` every process has one of its own. It is plain HTTP and asks nobody who he is: off loopback
    `private_network` must say that only hosts that may read them reach it."""

    enabled: bool = True
    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    private_network: bool = False


class OtelSection(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Spans of requests go to an OpenTelemetry collector at `endpoint` by OTLP over gRPC, such as http://127.0.0.1:4317;
    empty: nowhere. Needs stagemesh[otel]. The library's own variables (OTEL_EXPORTER_OTLP_...) say headers and TLS."""

    endpoint: str = ""
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0  # of requests: all their spans, or none


class TlsSection(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """PEM files, read again when they change. With the first three, all of TCP is TLS, and the processes of the mesh
    show each other certificates of `ca_file`; unix sockets are as private as their folder.

    Who has a certificate of `ca_file` is part of the mesh. So the Generate API, which any caller may reach that has a
    key, asks for client certificates of another authority, if `public_client_ca_file` names one, and for none else.
    `public_cert_file` and its key are what it shows, where that is not the mesh's certificate."""

    cert_file: FilePath = ""
    key_file: FilePath = ""
    ca_file: FilePath = ""
    server_name: str = ""  # what certificates of the mesh are for, where that is not the host of the address
    public_cert_file: FilePath = ""
    public_key_file: FilePath = ""
    public_client_ca_file: FilePath = ""

    @property
    def is_on(self) -> bool:
        return bool(self.cert_file)


class AuthSection(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`keys_file`: who may call the router, as `stagemesh keys add` writes it. Without it, whoever reaches it."""

    keys_file: FilePath = ""


class InstanceSection(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A pipeline. `stages` are its `pp_size` listen addresses; `layers` their layer counts, empty for balanced; `gpus`
    the GPU of each, by the host's numbers, empty for the first that is visible. A stage takes `memory_fraction` of its
    GPU: weights, workspace, and the rest for the pool."""

    name: Name
    role: Role
    pp_size: PpSize
    stages: tuple[str, ...]
    layers: tuple[Count, ...] = ()
    gpus: tuple[Annotated[int, Meta(ge=0, le=1023)], ...] = ()
    memory_fraction: Annotated[float, Meta(gt=0, le=0.98)] = 0.45


class Config(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole deployment. In the file an instance is a table of the array `[[instance]]`."""

    mesh: MeshSection
    nats: NatsSection = NatsSection()
    broker: BrokerSection
    router: RouterSection = RouterSection()
    openai: OpenaiSection = OpenaiSection()
    model: ModelSection
    engine: EngineSection = EngineSection()
    transfer: TransferSection = TransferSection()
    metrics: MetricsSection = MetricsSection()
    otel: OtelSection = OtelSection()
    tls: TlsSection = TlsSection()
    auth: AuthSection = AuthSection()
    instances: tuple[InstanceSection, ...]

    @property
    def num_stages(self) -> int:
        return sum(instance.pp_size for instance in self.instances)

    def instance(self, name: str) -> InstanceSection:
        """The instance of that name. Raises Rejected, naming those there are."""
        for instance in self.instances:
            if instance.name == name:
                return instance
        known = ", ".join(instance.name for instance in self.instances)
        raise Rejected("instance", f"no instance is named {name!r}; there are {known}")

    def of_role(self, role: Role) -> tuple[InstanceSection, ...]:
        return tuple(instance for instance in self.instances if instance.role == role)
