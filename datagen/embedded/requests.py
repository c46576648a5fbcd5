"""What a client may ask of `/generate`, parsed and checked; the messages are SGLang's."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from datagen.embedded.sampling import SamplingParams
from datagen.embedded.speculate import SpecCounts

KNOWN_PARAMS = set(SamplingParams.__dataclass_fields__) | {"custom_params"}
# clients of SGLang send them; taken only with the value that changes nothing
NEUTRAL_PARAMS: dict[str, Any] = {
    "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "min_new_tokens": 0,
    "spaces_between_special_tokens": True, "n": 1,
}  # fmt: skip


class BadRequest(Exception):
    """Answered with 400 and this text."""


@dataclass(slots=True)
class Request:
    """One sequence to be answered."""

    rid: str
    input_ids: list[int]
    params: SamplingParams
    capture: bool
    """Every prompt token's states are kept: for the spool, or for the answer (`states_in_answer`)."""
    return_prompt_token_ids: bool
    arrived: float
    states_in_answer: bool = False
    top_logprobs: int | None = None
    """How many of the likeliest tokens to report beside each output token; None: no logprobs."""
    output_ids: list[int] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    output_logprobs: list[tuple[float, list[tuple[float, int]]]] = field(default_factory=list)
    capture_note: dict[str, Any] | None = None
    states: list[list[float]] | None = None
    spec: SpecCounts | None = None
    return_steps: bool = False


def parse_generate(
    body: Any,
    *,
    encode: Callable[[str], list[int]],
    context_length: int,
    vocab_size: int,
    can_capture: bool,
    now: float,
) -> tuple[list[Request], bool]:
    """The requests of a body, and whether it is a batch. Raises BadRequest."""
    if not isinstance(body, dict):
        raise BadRequest("The request body must be a JSON object.")
    ids, text = body.get("input_ids"), body.get("text")
    if (ids is None) == (text is None):
        raise BadRequest("Either text or input_ids should be provided, but not both.")
    batch = isinstance(text, list) or (
        isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
    )
    prompts: list[Any]
    if text is not None:
        texts = text if isinstance(text, list) else [text]
        if not all(isinstance(t, str) for t in texts):
            raise BadRequest("text must be a string or a list of strings.")
        prompts = [encode(t) for t in texts]
    else:
        prompts = list(ids) if batch and ids else [ids]  # each is checked below
    if body.get("stream"):
        raise BadRequest("Streaming is not supported by this server.")
    n = len(prompts)
    rids = _per_item(body.get("rid"), n, "rid", str)
    params = _per_item(body.get("sampling_params"), n, "sampling_params", dict)
    hidden = _per_item(body.get("return_hidden_states"), n, "return_hidden_states", bool)
    logprob = _per_item(body.get("return_logprob"), n, "return_logprob", bool)
    tops = _per_item(body.get("top_logprobs_num"), n, "top_logprobs_num", int)
    requests = []
    for prompt, rid, raw, wants, scored, top in zip(
        prompts, rids, params, hidden, logprob, tops, strict=True
    ):
        _check_prompt(prompt, context_length, vocab_size)
        sampling, custom = _sampling(raw or {})
        if (raw or {}).get("max_new_tokens") is not None:
            _check_total(len(prompt), sampling.max_new_tokens, context_length)
        if wants and not can_capture:
            raise BadRequest(
                "The server is not configured to return the hidden states. "
                "Please set `--enable-return-hidden-states` to enable this feature."
            )
        to_spool = isinstance(custom, dict) and bool(custom.get("datagen"))
        if wants and not to_spool and sampling.max_new_tokens != 1:
            raise BadRequest(
                "Hidden states in the answer are supported by this server with max_new_tokens 1 only."
            )
        requests.append(
            Request(
                rid=rid or uuid.uuid4().hex,
                input_ids=prompt,
                params=sampling,
                capture=bool(wants),
                return_prompt_token_ids=bool(body.get("return_prompt_token_ids")),
                arrived=now,
                states_in_answer=bool(wants) and not to_spool,
                top_logprobs=max(top or 0, 0) if scored else None,
                return_steps=isinstance(custom, dict) and bool(custom.get("spec_steps")),
            )
        )
    if len({r.rid for r in requests}) != n:
        raise BadRequest("Duplicate request IDs detected within the request.")
    return requests, batch


def _per_item(value: Any, n: int, name: str, kind: type) -> list[Any]:
    values = value if isinstance(value, list) else [value] * n
    if len(values) != n:
        raise BadRequest(f"The length of {name} should be equal to the batch size.")
    if n > 1 and kind is str and isinstance(value, str):
        return [f"{value}_{i}" for i in range(n)]
    for v in values:
        if v is not None and not isinstance(v, kind):
            raise BadRequest(f"{name} must be of type {kind.__name__}, got {type(v).__name__}.")
    return values


def _check_prompt(prompt: Any, context_length: int, vocab_size: int) -> None:
    if not isinstance(prompt, list) or not prompt:
        raise BadRequest("input_ids must be a non-empty list of token ids.")
    if not all(type(i) is int and 0 <= i < vocab_size for i in prompt):
        raise BadRequest(f"The input_ids contain values out of the vocabulary of {vocab_size}.")
    if len(prompt) >= context_length:
        raise BadRequest(
            f"The input ({len(prompt)} tokens) is longer than the model's context length "
            f"({context_length} tokens)."
        )


def _check_total(n_prompt: int, max_new_tokens: int, context_length: int) -> None:
    total = n_prompt + max_new_tokens
    if total > context_length:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {context_length} "
            f"tokens. You requested a total of {total} tokens: {n_prompt} tokens from the input "
            f"messages and {max_new_tokens} tokens for the completion. Please reduce the number of "
            "tokens in the input messages or the completion to fit within the limit."
        )


def _sampling(raw: dict[str, Any]) -> tuple[SamplingParams, Any]:
    unknown = raw.keys() - KNOWN_PARAMS - NEUTRAL_PARAMS.keys()
    if unknown:
        raise BadRequest(f"Unexpected keyword argument '{min(unknown)}' in sampling_params.")
    for name, neutral in NEUTRAL_PARAMS.items():
        if raw.get(name, neutral) != neutral:
            raise BadRequest(f"{name} other than {neutral} is not supported by this server.")
    try:
        stop = raw.get("stop") or ()
        params = SamplingParams(
            max_new_tokens=128 if raw.get("max_new_tokens") is None else int(raw["max_new_tokens"]),
            temperature=float(raw.get("temperature", 1.0)),
            top_p=float(raw.get("top_p", 1.0)),
            top_k=int(raw.get("top_k", -1)),
            min_p=float(raw.get("min_p", 0.0)),
            stop_token_ids=frozenset(int(i) for i in raw.get("stop_token_ids") or ()),
            stop=(stop,) if isinstance(stop, str) else tuple(map(str, stop)),
            ignore_eos=bool(raw.get("ignore_eos", False)),
            skip_special_tokens=bool(raw.get("skip_special_tokens", True)),
            no_stop_trim=bool(raw.get("no_stop_trim", False)),
            sampling_seed=None if raw.get("sampling_seed") is None else int(raw["sampling_seed"]),
        )
    except (TypeError, ValueError) as e:
        raise BadRequest(f"sampling_params cannot be read: {e}") from e
    if params.max_new_tokens < 0:
        raise BadRequest(f"max_new_tokens must be at least 0, got {params.max_new_tokens}.")
    if params.temperature < 0:
        raise BadRequest(f"temperature must be non-negative, got {params.temperature}.")
    if not 0 < params.top_p <= 1:
        raise BadRequest(f"top_p must be in (0, 1], got {params.top_p}.")
    if params.top_k < 1 and params.top_k != -1:
        raise BadRequest(f"top_k must be -1 (disable), or at least 1, got {params.top_k}.")
    return params, raw.get("custom_params")
