"""One prompt, turn by turn: ask, store the response, capture its states, store them.

A turn is asked with the model's own earlier answers. What the disk already holds is never asked
again. After a rejected turn the later turns of the prompt are rejected as `earlier_turn`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from functools import partial

import numpy as np

from datagen.collect.answers import fault
from datagen.collect.context import Context
from datagen.collect.endings import LastWord
from datagen.collect.workshop import Workshop
from datagen.fanout.endpoint import Endpoint
from datagen.fanout.rows import Answered, Priority, Rejected, Role, Work
from datagen.prompts.turns import answer_message, context_messages, split_turns
from datagen.store.guards import examine
from datagen.store.partition import Outcome, PartitionStore
from datagen.store.plan import PlannedPrompt
from datagen.store.responses import Response
from datagen.target.client import Generation
from datagen.target.failures import RowFailure
from datagen.target.states import Captured, capture_rows
from datagen.target.tokens import Message

DISCARD_ASIDE_BYTES = 4 << 20  # a change of threads costs as much as giving back so many


def row_seed(run_seed: int, prompt_id: str, turn: int, refused: int = 0) -> int:
    """The sampling seed of a row, 31 bits: a pure function of run seed, prompt and turn.

    `refused`: answers to it that were no answers (loops); failures of a server do not change it.
    """
    key = f"{run_seed}/{prompt_id}/{turn}" + (f"/{refused}" if refused else "")
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big") >> 1


async def collect_prompt(shop: Workshop, store: PartitionStore, prompt: PlannedPrompt) -> None:
    """Bring every turn of `prompt` to collected or rejected. Raises what must stop the run."""
    segments = split_turns(json.loads(prompt.messages))
    tools = json.loads(prompt.tools) if prompt.tools else None
    answers: list[Message] = []
    profile = shop.config.profile
    sticky: str | None = None
    stop = LastWord()
    async with asyncio.TaskGroup() as captures:
        with stop:
            for turn in range(prompt.n_turns):
                outcome = store.outcome(prompt.prompt_id, turn)
                if outcome is Outcome.REJECTED and not store.has_response(prompt.prompt_id, turn):
                    break  # its later turns were rejected with it
                if outcome is Outcome.PENDING:
                    context = Context(
                        context_messages(segments, answers, turn),
                        tools,
                        prompt.thinking,
                        profile.thinking_kwarg,
                    )
                    if shop.renderer is not None:
                        context.render(shop.renderer)
                    try:
                        response = await _respond(shop, store, prompt, turn, context, sticky)
                    except Rejected as e:
                        await _reject(shop, store, prompt, turn, "generate", e)
                        break
                else:
                    response = await shop.commit(
                        store,
                        partial(PartitionStore.response, prompt_id=prompt.prompt_id, turn=turn),
                    )
                answers.append(
                    answer_message(
                        response.text, reasoning_end=profile.reasoning_end, thinking=prompt.thinking
                    )
                )
                sticky = response.endpoint
                if store.outcome(prompt.prompt_id, turn) is Outcome.RESPONDED:
                    captures.create_task(stop.of(_capture, shop, store, prompt, response))
    stop.say()
    shop.progress.prompts_done += 1


async def _respond(
    shop: Workshop,
    store: PartitionStore,
    prompt: PlannedPrompt,
    turn: int,
    context: Context,
    sticky: str | None,
) -> Response:
    """Have the target answer `context`, and store the response. Raises Rejected."""
    config, limit = shop.config, prompt.max_new_tokens
    if context.ids is not None and (excess := _excess(shop, context.ids, limit)):
        raise Rejected("over_context", excess, 0)
    kind = f"{prompt.source}/{prompt.thinking}"
    seed, answered = await _ask(shop, prompt, turn, context, sticky, kind, limit)
    if answered.value.finish_reason == "length":
        shop.progress.cut_by_length += 1
        if config.on_length == "longer":
            limit = min(2 * limit, _room(shop, context.known_ids))
            seed, answered = await _ask(shop, prompt, turn, context, sticky, kind, limit)
            shop.progress.cut_by_length += answered.value.finish_reason == "length"
    said = answered.value
    shop.lengths.observe(kind, len(said.output_ids))
    if said.finish_reason == "length" and config.on_length == "reject":
        raise Rejected("cut_by_length", f"{len(said.output_ids)} tokens", answered.attempts)
    response = _response_of(prompt, turn, context.known_ids, seed, answered)
    await shop.commit(store, lambda s: s.add_response(response))
    shop.progress.generated(len(said.output_ids))
    return response


def _room(shop: Workshop, ids: list[int]) -> int:
    """Tokens that an answer to `ids` may have at most."""
    return shop.context_length - len(ids) - 1


def _excess(shop: Workshop, ids: list[int], limit: int) -> str | None:
    """Why an answer of `limit` tokens does not fit behind `ids`; None when it does."""
    if limit <= _room(shop, ids):
        return None
    return f"{len(ids)} context tokens and {limit} new ones exceed {shop.context_length}"


async def _ask(
    shop: Workshop,
    prompt: PlannedPrompt,
    turn: int,
    context: Context,
    sticky: str | None,
    kind: str,
    limit: int,
) -> tuple[int | None, Answered[Generation]]:
    """One answer of at most `limit` tokens, and the seed that drew it. Raises Rejected."""
    config = shop.config
    sampling = config.sampling.heldout if prompt.split == "heldout" else config.sampling.train
    stop, drawn = config.profile.stop_token_ids, sampling.temperature > 0
    refused = 0
    seed: int | None = None

    async def ask(endpoint: Endpoint) -> Generation:
        nonlocal refused, seed
        ids = await context.ids_at(endpoint)
        if excess := _excess(shop, ids, limit):
            raise RowFailure("over_context", excess, permanent=True)
        seed = row_seed(config.seed, prompt.prompt_id, turn, refused) if drawn else None
        said = await endpoint.generate(
            ids,
            rid=_fresh_rid(prompt, turn, "g"),
            sampling=sampling,
            max_new_tokens=limit,
            stop_token_ids=stop,
            seed=seed,
        )
        reason = fault(said.output_ids, stop, config.loop_tokens)
        if reason is not None:
            refused += 1  # another draw may do better; greedy decoding would only repeat itself
            raise RowFailure(reason, f"{len(said.output_ids)} tokens", permanent=not drawn)
        return said

    if shop.lengths.is_long(kind, prompt.n_turns - turn):
        priority = Priority.LONG
    else:
        priority = Priority.NEXT_TURN if turn else Priority.FIRST_TURN
    work = Work(ask, Role.GENERATE, priority, limit, lambda g: len(g.output_ids), sticky)
    answered = await shop.dispatcher.run(work)
    return seed, answered


def _response_of(
    prompt: PlannedPrompt,
    turn: int,
    ids: list[int],
    seed: int | None,
    answered: Answered[Generation],
) -> Response:
    said = answered.value
    return Response(
        prompt_id=prompt.prompt_id,
        turn=turn,
        context_ids=np.asarray(ids, dtype=np.int32),
        response_ids=said.output_ids,
        text=said.text,
        finish_reason=said.finish_reason,
        stop_reason_detail=said.matched,
        prompt_tokens=said.prompt_tokens,
        completion_tokens=said.completion_tokens,
        cached_tokens=said.cached_tokens,
        num_retractions=said.num_retractions,
        spec_verify_ct=said.spec_verify_ct,
        seed=seed,
        endpoint=answered.endpoint,
        attempts=answered.attempts,
        queue_s=answered.queue_s,
        server_s=answered.server_s,
    )


async def _capture(
    shop: Workshop, store: PartitionStore, prompt: PlannedPrompt, response: Response
) -> None:
    """Prefill context and response, and store the states of every token.

    States that a guard refuses are asked for again, as after any failure of a row.
    """
    profile, guards = shop.config.profile, shop.guards
    refused = None
    ids = [*response.context_ids.tolist(), *response.response_ids.tolist()]
    n_bytes = len(ids) * profile.bytes_per_token

    async def prefill(endpoint: Endpoint) -> Captured:
        nonlocal refused
        rid = _fresh_rid(prompt, response.turn, "c")
        mode = shop.config.capture.mode
        captured = await capture_rows(endpoint, ids, rid, profile, mode=mode, final=shop.final)
        try:
            found = await asyncio.to_thread(examine, captured.rows, len(ids), guards.spec)
            refused = guards.judge(found, endpoint.url, first=refused is None)
            if refused is not None:
                raise RowFailure(refused.reason, refused.detail)
        except BaseException:  # whatever becomes of it, its file is not needed
            captured.discard()
            raise
        return captured

    async with shop.budget.hold(n_bytes):
        try:
            work = Work(
                prefill, Role.CAPTURE, Priority.CAPTURE, len(ids), lambda _: len(ids),
                response.endpoint,
            )  # fmt: skip
            captured = (await shop.dispatcher.run(work)).value
        except Rejected as e:
            await _reject(shop, store, prompt, response.turn, "capture", e, later_turns=False)
            return
        # taken out when it is written: its memory serves another sample while this one is synced
        encoded = [await shop.encoders.encode(store.encode, captured.rows)]
        stored = encoded[0].n_bytes
        await shop.commit(
            store,
            lambda s: s.add_states(
                prompt.prompt_id,
                response.turn,
                np.asarray(ids, dtype=np.int32),
                len(response.context_ids),
                encoded.pop(),
            ),
            n_bytes=stored,
        )
        if captured.path is not None:
            shop.spools.add(captured.path.parent)
        if n_bytes > DISCARD_ASIDE_BYTES:
            await asyncio.to_thread(captured.hand_back, shop.spares)
        else:
            captured.discard()
    shop.progress.captured(len(ids), n_bytes)


async def _reject(
    shop: Workshop,
    store: PartitionStore,
    prompt: PlannedPrompt,
    turn: int,
    stage: str,
    why: Rejected,
    *,
    later_turns: bool = True,
) -> None:
    """Enter one turn into the books as rejected, and the later ones with it, in one commit."""
    following = [
        later
        for later in range(turn + 1, prompt.n_turns if later_turns else 0)
        if store.outcome(prompt.prompt_id, later) in (Outcome.PENDING, Outcome.RESPONDED)
    ]

    def enter(s: PartitionStore) -> None:
        s.add_rejection(prompt.prompt_id, turn, stage, why.reason, why.detail, why.attempts)
        for later in following:
            s.add_rejection(
                prompt.prompt_id, later, stage, "earlier_turn", f"turn {turn}: {why.reason}", 0
            )

    await shop.commit(store, enter)
    shop.progress.rejected(why.reason)
    for _ in following:
        shop.progress.rejected("earlier_turn")


def _fresh_rid(prompt: PlannedPrompt, turn: int, kind: str) -> str:
    """A request id no other attempt has: a retry must not meet the first attempt's radix prefix."""
    return f"{prompt.prompt_id}-{turn}-{kind}-{uuid.uuid4().hex[:12]}"
