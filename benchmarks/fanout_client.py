"""The client that benchmarks/fanout.py measures, in a process of its own.

The product's own dispatcher, HTTP client, partition store and group commit over a plan of rows known by
number; no tokenizer, no capture. Prints one JSON line. Not a command for users.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import random
import resource
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop
from numpy.typing import NDArray

from datagen.collect.commits import Commits
from datagen.collect.gate import Fed, PartitionGate
from datagen.fanout.config import DispatchConfig
from datagen.fanout.dispatcher import Dispatcher
from datagen.fanout.endpoint import Endpoint
from datagen.fanout.garbage import seldom_collected
from datagen.fanout.lengths import LengthModel
from datagen.fanout.rows import Answered, Priority, Role, Work
from datagen.fanout.server import ServerSpec
from datagen.fanout.window import WindowConfig
from datagen.store.group_commit import GroupCommitter
from datagen.store.layout import RunLayout
from datagen.store.partition import Outcome, PartitionStore
from datagen.store.responses import Response
from datagen.store.states import StatesSpec
from datagen.target.client import Generation, SGLangClient
from datagen.target.profile import Sampling

DIGEST = "0" * 64
SPEC = StatesSpec(
    boundaries=(2, 15, 27), final_norm="post", dtype="BF16", hidden_size=576, codec="plane"
)
GREEDY = Sampling(temperature=0.0)
CONTEXT = np.arange(100, dtype=np.int32)
CONTEXT_IDS = CONTEXT.tolist()
LONG_MEAN = 2.5


def prompt_id(row: int) -> str:
    """The id of a row."""
    return hashlib.sha256(str(row).encode()).hexdigest()


def kind_of(row: int, one_long_in: int) -> str:
    """What the client sees of a row before it is answered, as its source or its category."""
    return "long" if one_long_in and row % one_long_in == 0 else "short"


def lengths(
    rows: int, mean: float, sigma: float, most: float, seed: int, one_long_in: int
) -> NDArray[np.int32]:
    """Output tokens of each row, int32 [rows]: lognormal of that mean, cut at `most` times it.

    Rows of the long kind are LONG_MEAN times the mean, the others as much shorter.
    """
    rng, spread = random.Random(seed), -(sigma**2) / 2  # numpy's are 4 MB of code
    share = 1 / one_long_in if one_long_in else 0.0
    means = {"long": LONG_MEAN * mean, "short": mean * (1 - share * LONG_MEAN) / (1 - share)}
    logs = {kind: math.log(m) + spread for kind, m in means.items()}
    drawn = (rng.lognormvariate(logs[kind_of(row, one_long_in)], sigma) for row in range(rows))
    return np.fromiter((max(1, min(most * mean, round(n))) for n in drawn), np.int32, rows)


async def ask(endpoint: Endpoint, row: int, tokens: int) -> Generation:
    """One row of `tokens`."""
    return await endpoint.generate(
        CONTEXT_IDS, rid=f"{row}-{time.monotonic_ns()}", sampling=GREEDY,
        max_new_tokens=tokens, stop_token_ids=(2,), seed=None,
    )  # fmt: skip


def response(row: int, answered: Answered[Generation]) -> Response:
    """As the collect job stores it."""
    said = answered.value
    return Response(
        prompt_id=prompt_id(row), turn=0, context_ids=CONTEXT,
        response_ids=said.output_ids, text=said.text,
        finish_reason=said.finish_reason, stop_reason_detail=said.matched,
        prompt_tokens=said.prompt_tokens, completion_tokens=said.completion_tokens,
        cached_tokens=said.cached_tokens, num_retractions=said.num_retractions,
        spec_verify_ct=said.spec_verify_ct, seed=None, endpoint=answered.endpoint,
        attempts=answered.attempts, queue_s=answered.queue_s, server_s=answered.server_s,
    )  # fmt: skip


Run = Callable[[int, int], Awaitable[Answered[Generation]]]


@asynccontextmanager
async def shared_queue(
    clients: Sequence[SGLangClient],
    window: int,
    limit: int,
    one_long_in: int,
    held: Callable[[], bool],
) -> AsyncIterator[tuple[Run, Fed]]:
    """The product: one dispatcher over all servers, and what it learns of lengths as the job does."""
    learnt = LengthModel()
    config = DispatchConfig(window=WindowConfig(initial=window, maximum=limit))
    servers = [ServerSpec(c, limit=limit) for c in clients]
    async with Dispatcher(servers, config, held=held) as dispatcher:

        async def run(row: int, tokens: int) -> Answered[Generation]:
            kind = kind_of(row, one_long_in)
            work = Work(
                lambda endpoint: ask(endpoint, row, tokens),
                Role.GENERATE,
                Priority.LONG if learnt.is_long(kind, 1) else Priority.FIRST_TURN,
                tokens,
                lambda g: len(g.output_ids),
            )
            answered = await dispatcher.run(work)
            learnt.observe(kind, tokens)
            return answered

        yield run, dispatcher


@dataclass(frozen=True, slots=True)
class Bound:
    """Servers whose rows are bound beforehand."""

    capacity: int
    hungry: bool = False


@asynccontextmanager
async def bound_rows(
    clients: Sequence[SGLangClient], window: int, *, in_order: bool
) -> AsyncIterator[tuple[Run, Fed]]:
    """How peers do it: row i belongs to server i mod n. `in_order`: a full server holds up all."""
    slots = [asyncio.Semaphore(window) for _ in clients]
    turn = asyncio.Lock()

    async def run(row: int, tokens: int) -> Answered[Generation]:
        server = row % len(clients)
        if in_order:
            async with turn:
                await slots[server].acquire()
        else:
            await slots[server].acquire()
        try:
            began = time.monotonic()
            value = await ask(clients[server], row, tokens)
            return Answered(value, clients[server].url, 1, 0.0, time.monotonic() - began)
        finally:
            slots[server].release()

    yield run, Bound(window * len(clients) if in_order else 10**9)


async def drive(
    args: argparse.Namespace, started: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Bring every row to disk; returns what it took. `started` is called before the first row."""
    tokens = lengths(args.rows, args.mean, args.sigma, args.most, args.seed, args.one_long_in)
    layout, committer = RunLayout(args.run), GroupCommitter()
    asked = 0
    async with AsyncExitStack() as stack:
        stack.callback(committer.close)
        stack.enter_context(seldom_collected())
        commits = Commits(committer)
        clients = [await stack.enter_async_context(SGLangClient(url)) for url in args.urls]
        source = {
            "shared": lambda: shared_queue(
                clients, args.window, args.limit, args.one_long_in, lambda: commits.crowded
            ),
            "static": lambda: bound_rows(clients, args.window, in_order=False),
            "round-robin": lambda: bound_rows(clients, args.window, in_order=True),
        }[args.policy]
        run, servers = await stack.enter_async_context(source())
        gate = PartitionGate(args.partition, lambda: servers)

        async def one(store: PartitionStore, row: int) -> None:
            nonlocal asked
            if store.outcome(prompt_id(row), 0) is Outcome.PENDING:
                asked += 1
                said = response(row, await run(row, int(tokens[row])))
                await commits.run(store, lambda s: s.add_response(said))

        async def partition(index: int) -> None:
            try:
                store = await asyncio.to_thread(
                    PartitionStore.open, layout.partition(index), fingerprint_digest=DIGEST,
                    spec=SPEC, shard_bytes=1 << 28,
                )  # fmt: skip
                rows = range(index * args.partition, min((index + 1) * args.partition, args.rows))
                gate.opened(len(rows))
                async with asyncio.TaskGroup() as group:
                    for row in rows:
                        group.create_task(one(store, row)).add_done_callback(gate.ended)
                await commits.run(store, lambda s: s.seal(len(rows)))
                await commits.run(store, lambda s: s.close())
            finally:
                gate.release()

        started()
        opened = time.monotonic()
        cpu = time.process_time()
        pending = [
            i for i in range(-(-args.rows // args.partition))
            if not layout.partition(i).summary.exists()
        ]  # fmt: skip
        async with asyncio.TaskGroup() as group:
            for index in pending:
                await gate.admit()
                group.create_task(partition(index))
        wall, cpu = time.monotonic() - opened, time.process_time() - cpu
    return {
        "rows": args.rows,
        "asked": asked,
        "wall_s": wall,
        "cpu_s": cpu,
        "tokens": float(tokens.sum()),
        "longest": float(tokens.max()),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags of a client; those of this process when none are given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--urls", nargs="+", required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--policy", default="shared", choices=["shared", "static", "round-robin"])
    parser.add_argument("--mean", type=float, default=1000, help="tokens of a row")
    parser.add_argument("--sigma", type=float, default=0.0)
    parser.add_argument("--most", type=float, default=5.0, help="longest row, in means")
    parser.add_argument(
        "--one-long-in", type=int, default=0, help="rows; 0: none is of the long kind"
    )
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--limit", type=int, default=1024)
    parser.add_argument("--partition", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def forked(arguments: Sequence[str]) -> None:
    """A client in a process that has all of this imported: for many that are killed soon."""
    uvloop.run(drive(parsed(arguments)))


def main() -> None:
    """Run, and print."""
    said = uvloop.run(drive(parsed(), lambda: print("started", flush=True)))
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    sys.exit(main())
