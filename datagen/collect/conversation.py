"""One prompt, turn by turn: ask, store the response, capture its states, store them.

A turn is asked with the model's own earlier answers. What the disk already holds is never asked
again. After a rejected turn the later turns of the prompt are rejected as `earlier_turn`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from datagen.collect.budget import ByteBudget
from datagen.collect.progress import Progress
from datagen.config import CollectConfig
from datagen.fanout.dispatcher import Answered, Dispatcher, Priority, Rejected
from datagen.fanout.endpoint import Endpoint
from datagen.prompts.turns import context_messages, split_turns
from datagen.store.group_commit import GroupCommitter
from datagen.store.partition import Outcome, PartitionStore
from datagen.store.plan import PlannedPrompt
from datagen.store.responses import Response
from datagen.target.client import Generation, SGLangClient
from datagen.target.states import Captured, capture_rows
from datagen.target.tokens import Renderer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Workshop:
    """What every conversation of a run shares."""

    config: CollectConfig
    renderer: Renderer
    dispatcher: Dispatcher
    committer: GroupCommitter
    commits: asyncio.Semaphore
    budget: ByteBudget
    progress: Progress
    context_length: int
    final: SGLangClient | None = None
    """A second server, for the final state alone."""

    async def commit(self, store: PartitionStore, action: Callable[[PartitionStore], T]) -> T:
        """Run `action` on the writer thread; returns once its rows are durable."""
        async with self.commits:
            return await asyncio.wrap_future(self.committer.submit(store, action))


def row_seed(run_seed: int, prompt_id: str, turn: int) -> int:
    """The sampling seed of a row, 31 bits: a pure function of run seed, prompt and turn."""
    key = f"{run_seed}/{prompt_id}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big") >> 1


async def collect_prompt(shop: Workshop, store: PartitionStore, prompt: PlannedPrompt) -> None:
    """Bring every turn of `prompt` to collected or rejected. Raises what must stop the run."""
    segments = split_turns(json.loads(prompt.messages))
    tools = json.loads(prompt.tools) if prompt.tools else None
    answers: list[str] = []
    async with asyncio.TaskGroup() as captures:
        for turn in range(prompt.n_turns):
            outcome = store.outcome(prompt.prompt_id, turn)
            if outcome is Outcome.REJECTED and not store.has_response(prompt.prompt_id, turn):
                break  # its later turns were rejected with it
            if outcome is Outcome.PENDING:
                ids = shop.renderer.render(
                    context_messages(segments, answers, turn), tools, prompt.thinking
                )
                try:
                    response = await _respond(shop, store, prompt, turn, ids)
                except Rejected as e:
                    await _reject(shop, store, prompt, turn, "generate", e)
                    break
            else:
                response = await shop.commit(
                    store, partial(PartitionStore.response, prompt_id=prompt.prompt_id, turn=turn)
                )
            answers.append(response.text)
            if store.outcome(prompt.prompt_id, turn) is Outcome.RESPONDED:
                captures.create_task(_capture(shop, store, prompt, response))
    shop.progress.prompts_done += 1


async def _respond(
    shop: Workshop, store: PartitionStore, prompt: PlannedPrompt, turn: int, ids: list[int]
) -> Response:
    """Have the target answer `ids`, and store the response. Raises Rejected."""
    config = shop.config
    room = shop.context_length - prompt.max_new_tokens - 1
    if len(ids) > room:
        raise Rejected(
            "over_context",
            f"{len(ids)} context tokens and {prompt.max_new_tokens} new ones exceed "
            f"{shop.context_length}",
            0,
        )
    sampling = config.sampling.heldout if prompt.split == "heldout" else config.sampling.train
    seed = row_seed(config.seed, prompt.prompt_id, turn) if sampling.temperature > 0 else None

    async def ask(endpoint: Endpoint) -> Generation:
        return await endpoint.generate(
            ids,
            rid=_fresh_rid(prompt, turn, "g"),
            sampling=sampling,
            max_new_tokens=prompt.max_new_tokens,
            stop_token_ids=config.profile.stop_token_ids,
            seed=seed,
        )

    priority = Priority.NEXT_TURN if turn else Priority.FIRST_TURN
    answered = await shop.dispatcher.run(ask, priority)
    said = answered.value
    if not set(said.output_ids) - set(config.profile.stop_token_ids):
        raise Rejected("empty_output", f"{said.completion_tokens} tokens", answered.attempts)
    response = _response_of(prompt, turn, ids, seed, answered)
    await shop.commit(store, lambda s: s.add_response(response))
    shop.progress.generated(len(said.output_ids))
    return response


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
        response_ids=np.asarray(said.output_ids, dtype=np.int32),
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
    """Prefill context and response, and store the states of every token."""
    profile = shop.config.profile
    ids = [*response.context_ids.tolist(), *response.response_ids.tolist()]
    n_bytes = len(ids) * profile.bytes_per_token

    async def prefill(endpoint: Endpoint) -> Captured:
        rid = _fresh_rid(prompt, response.turn, "c")
        mode = shop.config.capture.mode
        return await capture_rows(endpoint, ids, rid, profile, mode=mode, final=shop.final)

    async with shop.budget.hold(n_bytes):
        try:
            captured = (await shop.dispatcher.run(prefill, Priority.CAPTURE)).value
        except Rejected as e:
            await _reject(shop, store, prompt, response.turn, "capture", e, later_turns=False)
            return
        await shop.commit(
            store,
            lambda s: s.add_states(
                prompt.prompt_id,
                response.turn,
                np.asarray(ids, dtype=np.int32),
                len(response.context_ids),
                captured.rows,
            ),
        )
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
    last = prompt.n_turns if later_turns else turn + 1

    def enter(s: PartitionStore) -> None:
        s.add_rejection(prompt.prompt_id, turn, stage, why.reason, why.detail, why.attempts)
        for later in range(turn + 1, last):
            s.add_rejection(
                prompt.prompt_id, later, stage, "earlier_turn", f"turn {turn}: {why.reason}", 0
            )

    await shop.commit(store, enter)
    shop.progress.rejected(why.reason)
    for _ in range(turn + 1, last):
        shop.progress.rejected("earlier_turn")


def _fresh_rid(prompt: PlannedPrompt, turn: int, kind: str) -> str:
    """A request id no other attempt has: a retry must not meet the first attempt's radix prefix."""
    return f"{prompt.prompt_id}-{turn}-{kind}-{uuid.uuid4().hex[:12]}"
