"""Answers in the words of the engine proto: what gateways add up, and what they show."""

from __future__ import annotations

from typing import Any

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as engine

from stagemesh.services.router.engine_answer import EngineAnswer
from stagemesh.shared.pb import generator_pb2

Response = generator_pb2.GenerateResponse
STOP, LENGTH = generator_pb2.FINISH_REASON_STOP, generator_pb2.FINISH_REASON_LENGTH
PROMPT = [5, 6, 7]


def answer(*, stream: bool, stop_token_ids: tuple[int, ...] = ()) -> EngineAnswer:
    wanted = generator_pb2.GenerateRequest()
    wanted.token_ids.ids.extend(PROMPT)
    return EngineAnswer(engine, wanted, stream=stream, stop_token_ids=stop_token_ids)


def finished(reason: Any = LENGTH, tokens: int = 3, **more: Any) -> generator_pb2.Finished:
    usage = generator_pb2.Usage(prompt_tokens=len(PROMPT), completion_tokens=tokens, cached_tokens=2)
    return generator_pb2.Finished(finish_reason=reason, usage=usage, **more)


def test_a_stream_has_new_tokens_only_and_the_last_one_in_a_chunk() -> None:
    said = answer(stream=True)
    parts = [Response(token_ids=[1]), Response(), Response(token_ids=[2, 3], finished=finished())]
    messages = [message for part in parts for message in said.take(part)]
    assert [message.WhichOneof("response") for message in messages] == ["chunk", "chunk", "complete"]
    assert [list(message.chunk.token_ids) for message in messages[:2]] == [[1], [2, 3]]
    assert [message.chunk.completion_tokens for message in messages[:2]] == [1, 2]
    assert messages[0].chunk.prompt_tokens == len(PROMPT)
    complete = messages[2].complete
    assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == ("length", 3, 3)
    assert (complete.cached_tokens, list(complete.output_ids)) == (2, [])


def test_a_whole_answer_is_one_message_for_each_index() -> None:
    said = answer(stream=False)
    parts = [Response(index=index, token_ids=[index, 9], finished=finished(STOP)) for index in (1, 0)]
    completes = [message.complete for part in parts for message in said.take(part)]
    assert [(each.index, list(each.output_ids)) for each in completes] == [(1, [1, 9]), (0, [0, 9])]


@pytest.mark.parametrize(
    ("reason", "word"),
    [(STOP, "stop"), (LENGTH, "length"), (generator_pb2.FINISH_REASON_ABORT, "abort")],
)
def test_reasons_tell_the_truth(reason: Any, word: str) -> None:
    (message,) = answer(stream=True).take(Response(finished=finished(reason)))
    assert message.complete.finish_reason == word


def test_what_has_stopped_an_answer_is_named_if_the_client_has_named_it() -> None:
    (said,) = answer(stream=False).take(Response(token_ids=[9], finished=finished(STOP, stop="END")))
    assert said.complete.matched_stop_str == "END"
    (said,) = answer(stream=False, stop_token_ids=(9,)).take(Response(token_ids=[4, 9], finished=finished(STOP)))
    assert said.complete.matched_token_id == 9
    for reason, stop_token_ids in ((LENGTH, (9,)), (STOP, ())):
        said_of = answer(stream=False, stop_token_ids=stop_token_ids)
        (said,) = said_of.take(Response(token_ids=[9], finished=finished(reason)))
        assert said.complete.WhichOneof("matched_stop") is None


@pytest.mark.parametrize("stream", [True, False])
def test_log_probabilities_come_once_and_those_of_the_prompt_without_its_first_token(stream: bool) -> None:
    top = [generator_pb2.TokenLogprob(token_id=8, logprob=-0.5)]
    told = [generator_pb2.Logprobs(logprob=-0.25, top=top)]
    response = Response(token_ids=[1], logprobs=told, prompt_logprobs=told * 2, finished=finished())
    messages = list(answer(stream=stream).take(response))
    assert len(messages) == (2 if stream else 1)
    first = messages[0].chunk if stream else messages[0].complete
    assert list(first.output_logprobs.token_logprobs) == [-0.25]
    assert list(first.output_logprobs.token_ids) == [1]
    assert list(first.output_logprobs.top_logprobs[0].token_ids) == [8]
    prompt = first.input_logprobs
    assert [each.HasField("value") for each in prompt.token_logprobs] == [False, True, True]
    assert list(prompt.token_ids) == PROMPT
    assert [len(each.values) for each in prompt.top_logprobs] == [0, 1, 1]
    assert not messages[-1].complete.HasField("output_logprobs") or not stream
