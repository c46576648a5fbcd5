"""Asks a server with the drafter and one without the same rendered prompts, in one sitting.

Baseline and speculative passes alternate (B S S B ...), so that a warming machine or a busy neighbour
falls on both. A baseline of another day is no baseline. Where one machine cannot hold both servers, the
baseline is visited before and after (B, S, B), and its drift is reported.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from datagen.acceptance.conditions import known_arguments, require_servers
from datagen.acceptance.live import (
    BASELINE,
    SPECULATIVE,
    Answer,
    LivePrompt,
    LiveReport,
    Pass,
    Visit,
    live_report,
    require_spec_fields,
)
from datagen.errors import MeasurementError
from datagen.target.client import SGLangClient
from datagen.target.environment import server_environment
from datagen.target.failures import CapacityFailure, EndpointFailure, RowFailure
from datagen.target.profile import Sampling

GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Sitting:
    """What every server of a sitting is asked."""

    prompts: tuple[LivePrompt, ...]
    stop_token_ids: tuple[int, ...]
    concurrencies: tuple[int, ...] = (1,)
    rounds: int = 2
    sampling: Sampling = GREEDY

    def __post_init__(self) -> None:
        if not self.prompts:
            raise MeasurementError("no prompts to measure on")

    async def both(self, baseline_url: str, speculative_url: str) -> LiveReport:
        """Both servers up, in alternation. Raises MeasurementError when it cannot mean what is asked."""
        async with SGLangClient(baseline_url) as plain, SGLangClient(speculative_url) as drafting:
            clients = {BASELINE: plain, SPECULATIVE: drafting}
            about = {name: known_arguments(await c.server_info()) for name, c in clients.items()}
            require_servers(about[BASELINE], about[SPECULATIVE], baseline_url, speculative_url)
            for name, client in clients.items():
                await self._warm_up(name, client)
            passes: list[Pass] = []
            for concurrency in self._levels:
                for number in range(self.rounds):
                    order = (BASELINE, SPECULATIVE) if number % 2 == 0 else (SPECULATIVE, BASELINE)
                    passes += [await self._pass(n, clients[n], concurrency) for n in order]
            visits = [
                Visit(name, c.url, about[name], server_environment(c.url),
                      tuple(p for p in passes if p.server == name))
                for name, c in clients.items()
            ]  # fmt: skip
        return live_report(visits)

    async def one(self, name: str, url: str) -> Visit:
        """All rounds on one server, for `live_report` beside visits of the other. Raises MeasurementError."""
        async with SGLangClient(url) as client:
            about = known_arguments(await client.server_info())
            await self._warm_up(name, client)
            passes = [
                await self._pass(name, client, concurrency)
                for concurrency in self._levels
                for _ in range(self.rounds)
            ]
            return Visit(name, url, about, server_environment(url), tuple(passes))

    @property
    def _levels(self) -> list[int]:
        return sorted(set(self.concurrencies))

    async def _warm_up(self, name: str, client: SGLangClient) -> None:
        """The first request pays for lazy starts."""
        await _ask(name, client, self, self.prompts[:1], 1)

    async def _pass(self, name: str, client: SGLangClient, concurrency: int) -> Pass:
        found = await _ask(name, client, self, self.prompts, concurrency)
        if name == SPECULATIVE:
            require_spec_fields(found.answers, client.url)
        return found


async def _ask(
    name: str,
    client: SGLangClient,
    sitting: Sitting,
    prompts: Sequence[LivePrompt],
    concurrency: int,
) -> Pass:
    gate = asyncio.Semaphore(concurrency)

    async def one(prompt: LivePrompt) -> Answer:
        async with gate:
            started = time.monotonic()
            try:
                generation = await client.generate(
                    prompt.context_ids, rid=uuid.uuid4().hex, sampling=sitting.sampling,
                    max_new_tokens=prompt.max_new_tokens, stop_token_ids=sitting.stop_token_ids,
                    seed=0,
                )  # fmt: skip
            except (RowFailure, CapacityFailure, EndpointFailure) as e:
                raise MeasurementError(
                    f"sample {prompt.sample_id[:16]} failed on the {name} server: {e}",
                    where=client.url, fix="see the server's log",
                ) from e  # fmt: skip
            return Answer(prompt, generation, time.monotonic() - started)

    started = time.monotonic()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(p)) for p in prompts]
    except BaseExceptionGroup as errors:  # one failed, the others were cancelled
        raise errors.exceptions[0] from None
    return Pass(name, concurrency, time.monotonic() - started, tuple(t.result() for t in tasks))
