"""Every channel and server of the mesh has these options, so that the two ends of a connection never disagree: but for
the size of what a public server reads, which is its own."""

from __future__ import annotations

from typing import Final

MAX_MESSAGE_BYTES: Final = 64 << 20
KEEPALIVE_MS: Final = 10_000

_BOTH: Final = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
CHANNEL_OPTIONS: Final = (
    *_BOTH,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 10_000),  # which is how long an attempt may take: a busy peer is slow to answer
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),  # the mesh's own addresses never go through a proxy
    ("grpc.use_local_subchannel_pool", 1),
)
_SERVER: Final = (
    *_BOTH,
    # A client's pings at the interval above are welcome, also on an idle connection.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
    # The defaults cancel calls at random when thousands arrive at once; we refuse the surplus ourselves.
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 40_000),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server
)


def server_options(max_request_bytes: int = MAX_MESSAGE_BYTES) -> tuple[tuple[str, int], ...]:
    """For one that refuses messages that are larger, with RESOURCE_EXHAUSTED and both sizes."""
    return (*_SERVER, ("grpc.max_receive_message_length", max_request_bytes))
