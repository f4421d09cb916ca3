"""Every metric of every process: name, unit, meaning, labels. Nothing else declares one.

what a process measures --once a second, on its loop--> samples --> Exposition --> /metrics

Labels have few values: who says it (its scope), and the states and outcomes of our tables. Never a request's id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from stagemesh.shared.obs.tally import Distribution

PREFIX: Final = "stagemesh_"


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Scope(Enum):
    """The labels that say who speaks. A label that does not apply is empty, which Prometheus takes as absent."""

    MESH = ()
    INSTANCE = ("role", "instance")
    PROCESS = ("role", "instance", "pp_rank")


@dataclass(frozen=True, slots=True)
class Metric:
    """Counters get `_total` when they are shown."""

    kind: Kind
    name: str
    help: str
    scope: Scope
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """`labels` are the values of the metric's own labels. A histogram's value is a Distribution."""

    metric: Metric
    value: float | Distribution
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a process is: router, broker, or a stage."""

    role: str
    instance: str = ""
    pp_rank: int | None = None

    def values(self, scope: Scope) -> tuple[str, ...]:
        rank = "" if self.pp_rank is None else str(self.pp_rank)
        return (self.role, self.instance, rank)[: len(scope.value)]


def by_label(metric: Metric, values: Mapping[str, float]) -> Iterable[Sample]:
    """One sample for each value of the metric's only label."""
    return [Sample(metric, value, (label,)) for label, value in values.items()]


_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
_M, _I, _P = Scope.MESH, Scope.INSTANCE, Scope.PROCESS

# -- router --
REQUESTS = Metric(_C, "requests", "Requests that have ended, by how.", _M, ("outcome",))
CLIENT_REQUESTS = Metric(
    _C, "client_requests", "Requests that have ended, by the name of the API key and by how.", _M, ("client", "outcome")
)
CLIENT_TOKENS = Metric(
    _C, "client_tokens", "Tokens of requests that have ended, by the name of the API key.", _M, ("client", "kind")
)
UNAUTHENTICATED = Metric(_C, "unauthenticated_calls", "Calls refused for want of a right API key.", _M)
LIVE_REQUESTS = Metric(_G, "live_requests", "Requests that are not over.", _M)
TOKENS = Metric(_C, "tokens", "Tokens of prompts taken, and of answers passed on to clients.", _M, ("kind",))
TIME_TO_FIRST_TOKEN = Metric(
    _H, "time_to_first_token_seconds", "From a request's arrival to its first token, here in the router.", _M
)
TIME_PER_OUTPUT_TOKEN = Metric(
    _H, "time_per_output_token_seconds", "Mean time between the tokens of a request that ended well.", _M
)
REQUEST_SECONDS = Metric(_H, "request_seconds", "From a request's arrival to its end, for those that ended well.", _M)
TOKENIZE_SECONDS = Metric(_H, "tokenize_seconds", "Making token ids of a prompt, with the wait for a thread.", _M)
TICKET_SECONDS = Metric(_H, "ticket_seconds", "From a tokenized prompt to its ticket: placement and the broker.", _M)
WAITING_REQUESTS = Metric(
    _G,
    "waiting_requests",
    "Requests before their first token, by what they wait for; `recompute` are those whose KV is lost, after theirs.",
    _M,
    ("reason",),
)
OLDEST_WAITING = Metric(_G, "oldest_waiting_seconds", "Age of the oldest request that has no token yet; 0: none.", _M)
REFUSAL_SECONDS = Metric(
    _H, "refusal_seconds", "From a request's arrival to its refusal, for those refused for want of room.", _M
)
MORE_ATTEMPTS = Metric(_C, "more_attempts", "Attempts beyond a request's first one.", _M)
RECOMPUTED_TOKENS = Metric(_C, "recomputed_tokens", "Tokens whose KV was there before, of further attempts.", _M)

# -- broker --
TICKETS = Metric(_G, "tickets", "KV transfers that are not closed, by state.", _M, ("state",))
TICKETS_CLOSED = Metric(_C, "tickets_closed", "KV transfers that are over, by how.", _M, ("outcome",))
INSTANCES = Metric(_G, "instances", "Instances in the directory.", _M, ("role",))
INSTANCES_LOST = Metric(_C, "instances_lost", "Instances that have gone, by how the broker knew.", _M, ("reason",))
INSTANCES_RENEWED = Metric(
    _C,
    "instances_renewed",
    "Instances told to end and be started again, to free pages that their writes in doubt held, by why they could go.",
    _M,
    ("reason",),
)
TICKETS_PROVEN = Metric(
    _C, "tickets_proven", "Failed KV transfers proven over by the reaped exit of their writers, and a read-out.", _M
)
WATCHERS = Metric(_G, "watchers", "Streams that follow the directory: routers and heads.", _M)

EVENTS = Metric(_C, "events", "Events of the mesh, by what has happened.", _M, ("event",))
EVENTS_DROPPED = Metric(_C, "events_dropped", "Events that were never sent: no server, or more than it takes.", _M)
NATS_CONNECTED = Metric(_G, "nats_connected", "1 while the broker is connected to the NATS server.", _M)
NATS_RECONNECTS = Metric(_C, "nats_reconnects", "Times that connection came back.", _M)
NATS_SLOW = Metric(_C, "nats_slow", "Times that messages from NATS were thrown away, not read in time.", _M)

# -- heads --
SEQUENCES = Metric(
    _G,
    "sequences",
    "Sequences of an instance, by state; those that are over wait for what is in flight.",
    _I,
    ("state",),
)
RESERVE_WAIT = Metric(
    _H,
    "reserve_wait_seconds",
    "From asking for pages on the decode side to having them, as seen by the prompt (prefill), the broker and the "
    "allocator (decode).",
    _I,
)
PREFILL_SECONDS = Metric(_H, "prefill_seconds", "From a prompt's first chunk to its first token.", _I)
CHUNK_TOKENS = Metric(_H, "chunk_tokens", "Prompt tokens of a prefill step.", _I)
PREFILL_TOKENS = Metric(
    _C, "prefill_tokens", "Tokens of prompts that have started: found in the prefix cache, or computed.", _I, ("how",)
)
EVICTED_PAGES = Metric(_C, "evicted_pages", "Pages of the prefix cache that were needed, or flushed.", _I)
FIRST_STEP_WAIT = Metric(_H, "first_step_wait_seconds", "From a ticket's commit to the sequence's first step.", _I)
STEP_ROWS = Metric(_H, "step_rows", "Sequences in a decode step.", _I)
MICROBATCHES = Metric(_G, "microbatches_in_flight", "Microbatches with a step outstanding.", _I)
DECODED_TOKENS = Metric(_C, "decoded_tokens", "Tokens that decode steps made and a sequence took.", _I)
WASTED_ROWS = Metric(_C, "wasted_rows", "Rows of decode steps whose sequence was over when they came back.", _I)
OLDEST_SEQUENCE = Metric(
    _G,
    "oldest_sequence_seconds",
    "Since its arrival at its router, of the oldest sequence in each state; 0: none.",
    _I,
    ("state",),
)
WAITING_SEQUENCES = Metric(
    _G, "waiting_sequences", "Sequences of a decode instance that wait, by reason.", _I, ("reason",)
)
LONGEST_WAIT = Metric(
    _G, "longest_wait_seconds", "Of those, since when the first of each reason waits.", _I, ("reason",)
)
RETRACTIONS = Metric(_C, "retractions", "Sequences that gave their pages up and have their KV in host memory.", _I)
RESUMED = Metric(_C, "resumed_sequences", "Sequences that have their KV back from there.", _I)
RETRACTED_SECONDS = Metric(
    _H, "retracted_seconds", "From a sequence's retraction until it may run again, of those that may.", _I
)
RECOMPUTED = Metric(
    _C, "recomputed_sequences", "Sequences that gave their pages up and, for want of host memory, their KV.", _I
)
LOST_TOKENS = Metric(_C, "lost_kv_tokens", "Tokens whose KV these had.", _I)
TAKEN_BACK = Metric(_C, "reservations_taken_back", "Reservations that nobody used yet and that made room.", _I)
STALLED_ROWS = Metric(_C, "stalled_rows", "Rows left out of a decode step for want of a page.", _I)
PREDICTED_TOKENS = Metric(
    _H, "predicted_tokens", "New tokens of a sequence that finished, as expected when it was admitted.", _I
)
TRUE_TOKENS = Metric(_H, "true_tokens", "New tokens of a sequence that finished.", _I)
HOST_PAGES = Metric(
    _G, "host_pages", "Pages that retracted sequences fill in host memory, and those left.", _I, ("state",)
)
PAGES = Metric(_G, "pages", "KV pages of an instance, by where they are; they add up to pool_pages.", _I, ("state",))
POOL_PAGES = Metric(_G, "pool_pages", "KV pages of an instance.", _I)
STEPS_ISSUED = Metric(_C, "steps_issued", "Steps that the head has issued.", _I)
STEPS_OUTSTANDING = Metric(_G, "steps_outstanding", "Steps whose result is not back.", _I)
COMMANDS_UNACKNOWLEDGED = Metric(_G, "commands_unacknowledged", "Commands that not every stage has applied.", _I)
SESSIONS = Metric(_G, "sessions", "Routers connected to the head.", _I)

# -- stages --
STAGE_STEPS = Metric(_C, "stage_steps", "Steps that the stage has run.", _P)
STRUCTURES = Metric(
    _C, "structures", "Structures that last stages were asked to compile, by outcome.", _P, ("outcome",)
)
STRUCTURES_HELD = Metric(_G, "structures_held", "Compiled structures in the cache of a last stage.", _P)
STRUCTURE_SECONDS = Metric(_C, "structure_seconds", "Time in which structures were waited for to be compiled.", _P)
MASKS = Metric(_C, "masks", "Masks made for structured output.", _P)
MASK_SECONDS = Metric(_C, "mask_seconds", "Time of a core that masks took, under other steps.", _P)
MASK_WAIT_SECONDS = Metric(_C, "mask_wait_seconds", "Time in which steps waited for masks.", _P)
FORWARD_SECONDS = Metric(_C, "forward_seconds", "Time in which the stage ran a step.", _P)
BUBBLE_SECONDS = Metric(
    _C, "bubble_seconds", "Time in which the stage had nothing to run though sequences were on it.", _P
)
HOP_SECONDS = Metric(_C, "hop_seconds", "Time that activations took to the next stage.", _P)
HOPS = Metric(_C, "hops", "Steps whose activations went to the next stage.", _P)
RESIDENTS = Metric(_G, "residents", "Sequences on the stage.", _P)
QUEUED_COMMANDS = Metric(_G, "queued_commands", "Commands that the stage has not begun.", _P)
HOST_KV_BYTES = Metric(_G, "host_kv_bytes", "Host memory that the KV of retracted sequences takes on the stage.", _P)
HOST_COPIES = Metric(_C, "host_copies", "Copies of a sequence's KV to host memory, and back.", _P, ("direction",))
HOST_COPY_BYTES = Metric(_C, "host_copy_bytes", "Bytes of KV in those copies.", _P, ("direction",))
HOST_COPY_SECONDS = Metric(
    _C,
    "host_copy_seconds",
    "Time from the order to the end of those copies, which wait for each other.",
    _P,
    ("direction",),
)
KV_BYTES = Metric(_C, "kv_bytes", "Bytes of KV known to have arrived at decode stages.", _P)
KV_PIECES = Metric(_C, "kv_pieces", "Pieces of KV in writes that are done.", _P)
KV_SECONDS = Metric(_C, "kv_seconds", "Time that KV writes took, added up over writes that run at once.", _P)
KV_WRITES = Metric(_C, "kv_writes", "KV writes that are over, by how.", _P, ("state",))
KV_IN_DOUBT = Metric(_C, "kv_in_doubt", "KV writes that failed without proof that no byte arrives any more.", _P)
KV_CHECKED = Metric(_C, "kv_checked_pieces", "Pieces of KV whose checksum a decode stage has verified.", _P)
KV_CORRUPT = Metric(_C, "kv_corrupt_pieces", "Pieces of KV that were not what was sent.", _I)

# -- every process --
LOOP_LAG = Metric(_H, "loop_lag_seconds", "How much later than asked the event loop ran a callback, sampled.", _P)
LOOP_LAG_MAX = Metric(_G, "loop_lag_max_seconds", "The worst of loop_lag_seconds since the start.", _P)
INTEGRITY_VIOLATION = Metric(_G, "integrity_violation", "1 if an invariant did not hold when last checked.", _P)
CERTIFICATE_EXPIRY = Metric(
    _G,
    "certificate_expiry_timestamp_seconds",
    "Unix time at which the first certificate that the process shows, or the last authority that it trusts, expires.",
    _P,
    ("side",),
)
SAMPLED = Metric(
    _G, "sampled_timestamp_seconds", "Unix time of these samples: it stands still when the event loop does.", _P
)
