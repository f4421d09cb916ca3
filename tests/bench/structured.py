"""What structured output costs: answers that match JSON schemas against free ones, of the same prompts and lengths.

    structured.py [--answers 500] [--concurrency 32] [--model smollm2] [--rounds 2]

Each round asks for its share of the answers twice: by schema, then freely, each as many tokens as the structured answer
had. Every structured answer is validated. It costs a row more than a free one, whose end is known before it comes: of
answers of 13 tokens that alone is 7%.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jsonschema

sys.path.insert(0, str(Path(__file__).parents[2]))

from stagemesh.shared.pb import generator_pb2
from stagemesh.shared.rpc.client import Client
from tests.support.client import GENERATOR, Answer, generate
from tests.support.running import running_mesh
from tests.support.schemas import RECORDS as SCHEMAS

ROOM = 160  # tokens: more than any of the schemas can take


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of all answers: how many are valid, and the tokens a second of both kinds."""

    answers: int
    valid: int
    structured_rate: float
    free_rate: float
    mean_tokens: float

    @property
    def ratio(self) -> float:
        return self.structured_rate / self.free_rate


def request(number: int, **options: object) -> generator_pb2.GenerateRequest:
    schema = SCHEMAS[number % len(SCHEMAS)]
    made = generator_pb2.GenerateRequest(temperature=0.7, seed=number, **options)  # type: ignore[arg-type]
    made.chat.messages.add(role="user", content=f"Example {number}, as JSON for this schema: {json.dumps(schema)[:80]}")
    return made


async def ask(client: Client, requests: Sequence[generator_pb2.GenerateRequest], concurrency: int) -> list[Answer]:
    room = asyncio.Semaphore(concurrency)

    async def one(wanted: generator_pb2.GenerateRequest) -> Answer:
        async with room:
            return await generate(client, wanted)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(wanted)) for wanted in requests]
    return [task.result() for task in tasks]


def is_valid(number: int, answer: Answer) -> bool:
    try:
        jsonschema.validate(json.loads(answer.text), SCHEMAS[number % len(SCHEMAS)])
    except (ValueError, jsonschema.ValidationError) as error:
        print(f"answer {number} ({answer.reason}): {answer.text!r}: {str(error)[:100]}")
        return False
    return answer.reason == "stop"


async def measure(router: str, answers: int, concurrency: int, rounds: int) -> Outcome:
    """The grammars are compiled before: they are by the first request of each."""
    valid, tokens, seconds = 0, 0, [0.0, 0.0]
    async with Client(router, GENERATOR) as client:
        warm = [request(n, json_schema=json.dumps(s), max_tokens=ROOM) for n, s in enumerate(SCHEMAS)]
        await ask(client, warm, concurrency)
        for part in range(rounds):
            numbers = range(answers * part // rounds, answers * (part + 1) // rounds)
            schemas = [json.dumps(SCHEMAS[number % len(SCHEMAS)]) for number in numbers]
            wanted = [request(n, json_schema=s, max_tokens=ROOM) for n, s in zip(numbers, schemas, strict=True)]
            start_s = time.monotonic()
            structured = await ask(client, wanted, concurrency)
            middle_s = time.monotonic()
            counts = [len(answer.token_ids) for answer in structured]
            wanted = [request(n, max_tokens=c, ignore_eos=True) for n, c in zip(numbers, counts, strict=True)]
            free = await ask(client, wanted, concurrency)
            seconds = [seconds[0] + middle_s - start_s, seconds[1] + time.monotonic() - middle_s]
            assert [len(answer.token_ids) for answer in free] == counts
            valid += sum(is_valid(number, answer) for number, answer in zip(numbers, structured, strict=True))
            tokens += sum(counts)
    return Outcome(answers, valid, tokens / seconds[0], tokens / seconds[1], tokens / answers)


def run(folder: Path, model: str, answers: int, concurrency: int, rounds: int) -> Outcome:
    """On a mesh of two pipelines of two stages, which compute every prompt whole: the second time would be cheaper."""
    plain = {"STAGEMESH_ENGINE__PREFIX_CACHE": "false"}
    with running_mesh(folder, "--model", model, "--max-running", str(concurrency), environ=plain) as mesh:
        outcome = asyncio.run(measure(mesh.router, answers, concurrency, rounds))
        asyncio.run(mesh.check_idle())
    print(
        f"{outcome.valid} of {outcome.answers} answers over {len(SCHEMAS)} schemas are valid, "
        f"{outcome.mean_tokens:.1f} tokens each; {outcome.structured_rate:.1f} tokens/s structured, "
        f"{outcome.free_rate:.1f} free: {outcome.ratio:.3f}"
    )
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(Path(folder), options.model, options.answers, options.concurrency, options.rounds)
    sys.exit(outcome.valid != outcome.answers)


if __name__ == "__main__":
    main()
