"""What the stages of a simulated prefill instance have to send, page by page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stagemesh.shared.core.commands import COUNT, HANDLE, START, Command
from stagemesh.shared.engine.pages import pages_for
from tests.support.prefill_prompt import SimPrompt
from tests.support.sim_stages import SimStage, kv_at


@dataclass(slots=True, eq=False)
class Outgoing:
    """What one stage has to send of one prompt."""

    prompt: SimPrompt
    unwritten: list[int] = field(default_factory=list)  # pages of the prompt that are complete and not yet sent
    written: list[int] = field(default_factory=list)
    num_complete: int = 0
    over: bool = False  # whole or cancelled: it settles once nothing is in flight

    def progressed(self, tokens_done: int, page_size: int) -> None:
        """A chunk is in the pool: pages that are complete may leave."""
        self.over = tokens_done == self.prompt.num_tokens
        complete = pages_for(tokens_done, page_size) if self.over else tokens_done // page_size
        self.unwritten += range(self.num_complete, complete)
        self.num_complete = complete


class SimSender:
    """Of one stage."""

    def __init__(self, stage: SimStage, prompts: Mapping[int, SimPrompt]) -> None:
        self._stage, self._prompts = stage, prompts  # by handle
        self.outgoing: dict[int, Outgoing] = {}  # by handle

    def after(self, command: Command) -> None:
        """The stage has applied it."""
        for join in command.joins:
            if join.send is not None:
                self.outgoing[join.handle] = Outgoing(self._prompts[join.handle])
        for row in [] if command.step is None else command.step.rows.tolist():
            if (outgoing := self.outgoing.get(row[HANDLE])) and not outgoing.over:
                outgoing.progressed(row[START] + row[COUNT], self._stage.page_size)
        for handle in command.cancels:
            if handle in self.outgoing:
                self.outgoing[handle].over, self.outgoing[handle].unwritten = True, []
        assert self.outgoing.keys() <= self._stage.residents.keys()

    def write(self, handle: int) -> None:
        """One page leaves: it must still hold what was computed."""
        outgoing, stage = self.outgoing[handle], self._stage
        index = outgoing.unwritten.pop(0)
        resident = stage.residents[handle]
        outgoing.written.append(index)
        last = min((index + 1) * stage.page_size, outgoing.prompt.num_tokens)
        for position in range(index * stage.page_size, last):
            assert stage.pool[stage.slot(resident, position)] == kv_at(outgoing.prompt.ref, position)

    def settle(self, handle: int) -> SimPrompt:
        """Nothing of it is in flight any more."""
        outgoing = self.outgoing.pop(handle)
        assert outgoing.over
        assert not outgoing.unwritten
        prompt = outgoing.prompt
        if not (prompt.gone or prompt.aborted or prompt.failed):
            assert outgoing.written == list(range(pages_for(prompt.num_tokens, self._stage.page_size)))
        return prompt
