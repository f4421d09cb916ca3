"""Operators' commands as any program calls them: with the plain client library."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import nats
from nats.aio.client import Client

TIMEOUT_S = 60.0


class CommandError(Exception):
    """What the answer's headers say."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code, self.text = code, text


class Operator:
    """Calls commands of one mesh."""

    def __init__(self, client: Client, mesh: str = "local") -> None:
        self.client, self._mesh = client, mesh

    async def call(self, command: str, **fields: Any) -> dict[str, Any]:
        """Raises CommandError."""
        return await self.send(command, json.dumps(fields).encode())

    async def send(self, command: str, payload: bytes) -> dict[str, Any]:
        message = await self.client.request(f"stagemesh.{self._mesh}.admin.{command}", payload, timeout=TIMEOUT_S)
        headers = message.headers or {}
        if "Nats-Service-Error-Code" in headers:
            raise CommandError(headers["Nats-Service-Error-Code"], headers["Nats-Service-Error"])
        answer: dict[str, Any] = json.loads(message.data)
        return answer

    async def discover(self, verb: str) -> dict[str, Any]:
        """What the micro protocol's PING, INFO or STATS is answered."""
        message = await self.client.request(f"$SRV.{verb}.stagemesh", b"", timeout=TIMEOUT_S)
        found: dict[str, Any] = json.loads(message.data)
        return found


@asynccontextmanager
async def operator(url: str) -> AsyncIterator[Operator]:
    client = await nats.connect(url)
    try:
        yield Operator(client)
    finally:
        await client.close()
