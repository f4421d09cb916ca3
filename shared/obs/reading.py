"""The numbers of a process of one moment, for tools that ask it: what a metric is called, its labels, its value."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from stagemesh.shared.errors import ProtocolViolation
from stagemesh.shared.obs.metrics import Sample
from stagemesh.shared.obs.tally import Distribution


class Reading(msgspec.Struct, frozen=True):
    """`labels` are the values of the metric's own labels, in their order."""

    name: str
    labels: tuple[str, ...]
    value: float


class Readings:
    """Those of one process."""

    def __init__(self, readings: Iterable[Reading]) -> None:
        self._values: dict[str, dict[tuple[str, ...], float]] = {}
        for reading in readings:
            self._values.setdefault(reading.name, {})[reading.labels] = reading.value

    def of(self, name: str) -> dict[str, float]:
        """By the first label."""
        return {labels[0] if labels else "": value for labels, value in self._values.get(name, {}).items()}

    def total(self, name: str) -> float:
        """Over all labels; 0 if there is none."""
        return sum(self._values.get(name, {}).values())


def encode_readings(samples: Iterable[Sample]) -> bytes:
    """A JSON array; histograms are left out."""
    return msgspec.json.encode(
        [
            Reading(sample.metric.name, sample.labels, float(sample.value))
            for sample in samples
            if not isinstance(sample.value, Distribution)
        ]
    )


def decode_readings(data: bytes) -> Readings:
    """Raises ProtocolViolation for anything else."""
    try:
        return Readings(msgspec.json.decode(data, type=list[Reading]))
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolViolation(f"no readings: {error}") from None
