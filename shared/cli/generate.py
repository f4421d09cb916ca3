"""`stagemesh generate`: sends a request and prints the text as it comes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from stagemesh.shared.cli.access import client_files
from stagemesh.shared.errors import Rejected, StagemeshError

DEFAULT_ROUTER = "127.0.0.1:8470"
MAX_SEED = 2**64 - 1


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
    seed: Annotated[int | None, typer.Option(min=0, max=MAX_SEED, help="Makes a random answer repeatable.")] = None,
    presence_penalty: Annotated[float, typer.Option(help="Against tokens that the answer has, -2 to 2.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, for each time.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="A factor, against those of the prompt too.")] = 1.0,
    logit_bias: Annotated[list[str] | None, typer.Option(help="TOKEN_ID=BIAS; again for more.")] = None,
    n: Annotated[int, typer.Option("--n", help="So many answers; they need a temperature to differ.")] = 1,
    json_schema: Annotated[str, typer.Option(help="What the answer matches, or @FILE.")] = "",
    regex: Annotated[str, typer.Option(help="What the answer matches, or @FILE.")] = "",
    ebnf: Annotated[str, typer.Option(help="A grammar whose rule root the answer matches, or @FILE.")] = "",
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end token.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0.001, help="Seconds for the whole answer.")] = 600.0,
) -> None:
    """Sends one request; exits with 0 once it has ended with its tokens."""
    from stagemesh.shared.pb import generator_pb2
    from stagemesh.shared.runtime.loop import run

    asked = generator_pb2.ChatMessages(messages=[_filled("ChatMessage", role="user", content=prompt)]) if chat else None
    request = _filled(
        "GenerateRequest",
        text=None if chat else prompt,
        chat=asked,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        ignore_eos=ignore_eos,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=dict(_bias(text) for text in logit_bias or ()),
        n=n,
        **_structure(json_schema=json_schema, regex=regex, ebnf=ebnf),
    )
    answer = run(_follow(router, request, timeout_s, show=not as_json))
    print(json.dumps(answer, ensure_ascii=False) if as_json else "")


def _filled(kind: str, **fields: Any) -> Any:
    """A message of the API. Raises Rejected, naming the field, for a number that it cannot hold, or text that is no
    Unicode; what it can hold the router judges."""
    from stagemesh.shared.pb import generator_pb2

    made = getattr(generator_pb2, kind)
    message = made()
    for name, value in fields.items():
        try:
            message.MergeFrom(made(**{name: value}))
        except ValueError as error:
            why = "is not UTF-8" if isinstance(error, UnicodeError) else f"cannot be {value!r}"
            raise Rejected(name, why) from None
    return message


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise Rejected("--logit-bias", f"expected TOKEN_ID=BIAS, got {text!r}") from None


def _structure(**given: str) -> dict[str, Any]:
    """The one that is given. Raises Rejected for more, or a file that cannot be read."""
    wanted = {name: text for name, text in given.items() if text}
    if len(wanted) > 1:
        raise Rejected(f"--{list(wanted)[1]}".replace("_", "-"), "only one of json-schema, regex and ebnf can be given")
    return {name: _text_of(name, text) for name, text in wanted.items()}


def _text_of(name: str, text: str) -> str:
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise Rejected(f"--{name}".replace("_", "-"), f"{text[1:]}: cannot be read ({error})") from None


async def _follow(router: str, request: Any, timeout_s: float, *, show: bool) -> dict[str, Any]:
    from stagemesh.shared.pb import generator_pb2
    from stagemesh.shared.rpc.access import router_dial
    from stagemesh.shared.rpc.client import Client

    service = generator_pb2.DESCRIPTOR.services_by_name["Generator"]
    answers = [_Collected() for _ in range(max(1, request.n))]
    usage = generator_pb2.Usage()
    async with Client(router, service, wait=False, dial=router_dial(client_files())) as client:
        try:
            async for response in client.receive("Generate", request, timeout_s=timeout_s):
                answers[response.index].take(response)
                if show and len(answers) == 1:
                    sys.stdout.write(response.text)
                    sys.stdout.flush()
                if response.finished.HasField("total_usage"):
                    usage = response.finished.total_usage
        except StagemeshError:
            if show and answers[0].text:
                print(flush=True)  # or the error would stand in the last line of the text
            raise
    if show and len(answers) > 1:
        sys.stdout.write("\n".join(f"[{index}] {answer.text}" for index, answer in enumerate(answers)))
    told = [answer.told for answer in answers]
    counts = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
    return {**told[0], **({"answers": told} if len(told) > 1 else {}), "usage": counts}


class _Collected:
    """One answer."""

    def __init__(self) -> None:
        self.text, self._token_ids = "", list[int]()
        self._reason, self._timing = "", {"first_token_s": 0.0, "total_s": 0.0}

    def take(self, response: Any) -> None:
        from stagemesh.shared.pb.generator_pb2 import FinishReason

        self.text += response.text
        self._token_ids += response.token_ids
        if response.HasField("finished"):
            reason, timing = response.finished.finish_reason, response.finished.timing
            self._reason = FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
            self._timing = {"first_token_s": timing.first_token_s, "total_s": timing.total_s}

    @property
    def told(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "token_ids": self._token_ids,
            "finish_reason": self._reason,
            "timing": self._timing,
        }
