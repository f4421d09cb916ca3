"""Reading a process's metrics over HTTP, as Prometheus does."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from tests.support.running import SETTLE_LIMIT_S

PREFIX = "stagemesh_"


class Scrape:
    """What one process has said: values by name, then by labels."""

    def __init__(self, text: str) -> None:
        self._values: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._values.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value

    @property
    def names(self) -> set[str]:
        return set(self._values)

    def label_values(self, name: str, label: str) -> set[str]:
        """Those that any series of the full name `name` has for `label`."""
        return {dict(labels).get(label, "") for labels in self._values.get(name, {})}

    def labels(self, name: str) -> list[Mapping[str, str]]:
        return [dict(labels) for labels in self._values[PREFIX + name]]

    def value(self, name: str, **labels: str) -> float:
        """Of the only series of that name with these labels among its own."""
        wanted = frozenset(labels.items())
        (found,) = [value for has, value in self._values[PREFIX + name].items() if wanted <= has]
        return found

    def of(self, name: str, label: str) -> dict[str, float]:
        """All series of that name, by the value of `label`."""
        return {dict(labels)[label]: value for labels, value in self._values[PREFIX + name].items()}

    def process_value(self, name: str) -> float:
        (value,) = self._values[f"process_{name}"].values()
        return value


def fetch(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        text: str = response.read().decode()
    return text


async def scrape_after(address: str, unix_s: float) -> Scrape:
    """Samples of a moment after `unix_s`: each round asks the process, which takes its time."""
    async with asyncio.timeout(SETTLE_LIMIT_S):
        while True:
            scrape = Scrape(await asyncio.to_thread(fetch, address))
            if scrape.value("sampled_timestamp_seconds") > unix_s:
                return scrape
