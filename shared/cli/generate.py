"""`stagemesh generate`: sends a request and prints the text as it comes."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from stagemesh.shared.cli.access import client_files
from stagemesh.shared.errors import Rejected

DEFAULT_ROUTER = "127.0.0.1:8470"


def checked_router(text: str) -> str:
    """HOST:PORT, or Rejected."""
    from stagemesh.shared.config.address import parse_address

    if parse_address(text, "--router").port == 0:
        raise Rejected("--router", f"expected HOST:PORT, got {text!r}")
    return text


RouterOption = Annotated[str, typer.Option("--router", help="HOST:PORT of the router.", callback=checked_router)]


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("generate", help="Send a prompt and stream the answer.")(generate)


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt, taken as it is; with --chat, what the user says.")],
    router: RouterOption = DEFAULT_ROUTER,
    max_tokens: Annotated[int | None, typer.Option(help="New tokens at most.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all tokens.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 keeps all tokens.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes a random answer repeatable.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end token.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds for the whole answer.")] = 600.0,
) -> None:
    """Sends one request; exits with 0 once it has ended with its tokens."""
    from stagemesh.shared.pb import generator_pb2
    from stagemesh.shared.runtime.loop import run

    request = generator_pb2.GenerateRequest(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        ignore_eos=ignore_eos,
    )
    if chat:
        request.chat.messages.add(role="user", content=prompt)
    else:
        request.text = prompt
    answer = run(_follow(router, request, timeout_s, show=not as_json))
    print(json.dumps(answer, ensure_ascii=False) if as_json else "")


async def _follow(router: str, request: Any, timeout_s: float, *, show: bool) -> dict[str, Any]:
    from stagemesh.shared.pb import generator_pb2
    from stagemesh.shared.rpc.access import router_dial
    from stagemesh.shared.rpc.client import Client

    service = generator_pb2.DESCRIPTOR.services_by_name["Generator"]
    text, token_ids, finished = "", [], generator_pb2.Finished()
    async with Client(router, service, wait=False, dial=router_dial(client_files())) as client:
        async for response in client.receive("Generate", request, timeout_s=timeout_s):
            text += response.text
            token_ids += response.token_ids
            if show:
                sys.stdout.write(response.text)
                sys.stdout.flush()
            if response.HasField("finished"):
                finished = response.finished
    reason = generator_pb2.FinishReason.Name(finished.finish_reason).removeprefix("FINISH_REASON_").lower()
    return {
        "text": text,
        "token_ids": token_ids,
        "finish_reason": reason,
        "usage": {
            "prompt_tokens": finished.usage.prompt_tokens,
            "completion_tokens": finished.usage.completion_tokens,
        },
        "timing": {"first_token_s": finished.timing.first_token_s, "total_s": finished.timing.total_s},
    }
