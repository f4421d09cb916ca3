"""When certificates expire: read from PEM, told in days."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

SOON_S: Final = 14 * 86400.0
"""From then on it is said: time to issue others in the hours of work."""


def not_after_s(cert: bytes, ca: bytes) -> float | None:
    """Unix time at which the first of `cert` expires, a certificate and those between it and its authority, or the last
    of the authorities in `ca`: of these an old one may stay while it is replaced. None for what cannot be read."""
    from cryptography import x509  # only who has TLS pays for it

    def ends(pem: bytes) -> list[float]:
        return [found.not_valid_after_utc.timestamp() for found in x509.load_pem_x509_certificates(pem)]

    try:
        return min([*(ends(cert) if cert else ()), *((max(ends(ca)),) if ca else ())], default=None)
    except ValueError:  # the TLS library takes more than this one does
        return None


def is_soon(end_s: float | None, now_s: float) -> bool:
    """It has expired, or will before anybody has looked at it again."""
    return end_s is not None and end_s - now_s < SOON_S


def describe_end(end_s: float, now_s: float) -> str:
    """`expires 2027-11-30, in 364 days`, or `has expired 2026-11-29`."""
    day = datetime.fromtimestamp(end_s, UTC).date()
    return f"has expired {day}" if end_s <= now_s else f"expires {day}, in {int((end_s - now_s) // 86400)} days"
