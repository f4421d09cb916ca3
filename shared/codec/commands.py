"""Step commands and sampling parameters on the wire."""

from __future__ import annotations

from stagemesh.shared.codec.arrays import bytes_to_floats, floats_to_bytes, to_array, to_bytes, to_tuple
from stagemesh.shared.codec.mesh import request_from_pb, request_to_pb, stage_from_pb, stage_to_pb
from stagemesh.shared.core.commands import ROW_WIDTH, Command, Join, SendPlan, Step, TokenLogprobs
from stagemesh.shared.core.sampling import STRUCTURE_KINDS, SamplingParams, Structure
from stagemesh.shared.errors import ProtocolViolation
from stagemesh.shared.pb import instance_pb2, stage_pb2


def sampling_to_pb(params: SamplingParams) -> instance_pb2.Sampling:
    return instance_pb2.Sampling(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
        ignore_eos=params.ignore_eos,
        eos_token_ids=params.eos_token_ids,
        stop_token_ids=params.stop_token_ids,
        min_tokens=params.min_tokens,
        min_p=params.min_p,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        bias_ids=to_bytes([token_id for token_id, _ in params.logit_bias]),
        bias_values=floats_to_bytes([value for _, value in params.logit_bias]),
        prompt_ids=to_bytes(params.prompt_ids),
        generated=to_bytes(params.generated),
        structure=None if params.structure is None else structure_to_pb(params.structure),
    )


def sampling_from_pb(message: instance_pb2.Sampling) -> SamplingParams:
    """Raises ProtocolViolation for arrays that do not fit together, or a structure of an unknown kind."""
    bias_ids, bias_values = to_tuple(message.bias_ids), bytes_to_floats(message.bias_values)
    if len(bias_ids) != len(bias_values):
        raise ProtocolViolation(f"{len(bias_values)} biases of {len(bias_ids)} tokens")
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        seed=message.seed,
        ignore_eos=message.ignore_eos,
        eos_token_ids=tuple(message.eos_token_ids),
        stop_token_ids=tuple(message.stop_token_ids),
        min_tokens=message.min_tokens,
        min_p=message.min_p,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty or 1.0,
        logit_bias=tuple(zip(bias_ids, bias_values, strict=True)),
        prompt_ids=to_tuple(message.prompt_ids),
        generated=to_tuple(message.generated),
        structure=structure_from_pb(message.structure) if message.HasField("structure") else None,
    )


def structure_to_pb(structure: Structure) -> instance_pb2.Structure:
    return instance_pb2.Structure(kind=structure.kind, text=structure.text)


def structure_from_pb(message: instance_pb2.Structure) -> Structure:
    """Raises ProtocolViolation for a kind that this version does not know."""
    kind = next((kind for kind in STRUCTURE_KINDS if kind == message.kind), None)
    if kind is None:
        raise ProtocolViolation(f"unknown kind of structure: {message.kind!r}")
    return Structure(kind, message.text)


def command_to_pb(command: Command) -> stage_pb2.Command:
    return stage_pb2.Command(
        number=command.number,
        drops=to_bytes(command.drops),
        cancels=to_bytes(command.cancels),
        retracts=to_bytes(command.retracts),
        resumes=to_bytes(command.resumes),
        page_deltas=to_bytes(command.page_deltas),
        joins=[_join_to_pb(join) for join in command.joins],
        step=None if command.step is None else _step_to_pb(command.step),
    )


def command_from_pb(message: stage_pb2.Command) -> Command:
    """Raises ProtocolViolation if an array has no whole number of entries."""
    return Command(
        number=message.number,
        drops=to_tuple(message.drops),
        cancels=to_tuple(message.cancels),
        retracts=to_tuple(message.retracts),
        resumes=to_tuple(message.resumes),
        page_deltas=to_array(message.page_deltas),
        joins=tuple(_join_from_pb(join) for join in message.joins),
        step=_step_from_pb(message.step) if message.HasField("step") else None,
    )


def _step_to_pb(step: Step) -> stage_pb2.Step:
    rows, tokens = to_bytes(step.rows), to_bytes(step.tokens)
    return stage_pb2.Step(number=step.number, microbatch=step.microbatch, rows=rows, tokens=tokens)


def _step_from_pb(message: stage_pb2.Step) -> Step:
    rows = to_array(message.rows)
    if len(rows) % ROW_WIDTH:
        raise ProtocolViolation(f"step {message.number}: {len(rows)} numbers are no whole rows")
    return Step(message.number, message.microbatch, rows.reshape(-1, ROW_WIDTH), to_array(message.tokens))


def _join_to_pb(join: Join) -> stage_pb2.Join:
    return stage_pb2.Join(
        handle=join.handle,
        request=request_to_pb(join.request),
        sampling=sampling_to_pb(join.sampling),
        send=None if join.send is None else send_to_pb(join.send),
        prompt_tokens=join.prompt_tokens,
    )


def _join_from_pb(message: stage_pb2.Join) -> Join:
    return Join(
        handle=message.handle,
        request=request_from_pb(message.request),
        sampling=sampling_from_pb(message.sampling),
        send=send_from_pb(message.send) if message.HasField("send") else None,
        prompt_tokens=message.prompt_tokens,
    )


def send_to_pb(plan: SendPlan) -> stage_pb2.SendPlan:
    return stage_pb2.SendPlan(
        ticket_id=plan.ticket_id,
        prompt_tokens=plan.prompt_tokens,
        pages=to_bytes(plan.pages),
        targets=[stage_to_pb(target) for target in plan.targets],
    )


def send_from_pb(message: stage_pb2.SendPlan) -> SendPlan:
    targets = tuple(stage_from_pb(target) for target in message.targets)
    return SendPlan(message.ticket_id, message.prompt_tokens, to_tuple(message.pages), targets)


def logprobs_to_pb(logprobs: TokenLogprobs) -> instance_pb2.TokenLogprobs:
    return instance_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        top_ids=to_bytes(logprobs.top_ids),
        top_logprobs=floats_to_bytes(logprobs.top_logprobs),
        prompt=[logprobs_to_pb(told) for told in logprobs.prompt],
        failure=logprobs.failure,
    )


def logprobs_from_pb(message: instance_pb2.TokenLogprobs) -> TokenLogprobs:
    """Raises ProtocolViolation if ids and values are not as many."""
    ids, values = to_tuple(message.top_ids), bytes_to_floats(message.top_logprobs)
    if len(ids) != len(values):
        raise ProtocolViolation(f"{len(values)} log probabilities of {len(ids)} tokens")
    prompt = tuple(logprobs_from_pb(told) for told in message.prompt)
    return TokenLogprobs(message.logprob, ids, values, prompt, message.failure)
