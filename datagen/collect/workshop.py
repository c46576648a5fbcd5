"""What every conversation of a run shares: servers, stores, budgets, books."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from datagen.capture import spares
from datagen.collect.budget import ByteBudget
from datagen.collect.commits import Commits
from datagen.collect.encoding import EncodePool, short_turns, threads_for, writers_for
from datagen.collect.progress import Progress
from datagen.config import MIB, CollectConfig
from datagen.fanout.dispatcher import Dispatcher
from datagen.fanout.lengths import LengthModel
from datagen.store.group_commit import GroupCommitter
from datagen.store.guards import Guards
from datagen.store.partition import PartitionStore
from datagen.target.client import SGLangClient
from datagen.target.tokens import Renderer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Workshop:
    """What every conversation of a run shares."""

    config: CollectConfig
    renderer: Renderer | None
    """None: the server that answers a turn renders it."""
    dispatcher: Dispatcher
    commits: Commits
    encoders: EncodePool
    budget: ByteBudget
    progress: Progress
    guards: Guards
    context_length: int
    final: SGLangClient | None = None
    """A second server, for the final state alone."""
    lengths: LengthModel = field(default_factory=LengthModel)
    spools: set[Path] = field(default_factory=set)
    """Where captures came from."""

    @property
    def spares(self) -> int:
        """How many files may be handed back to a server: an eighth of what the run may hold."""
        return self.config.spool_mib * MIB // 8 // spares.MOST_BYTES

    def close(self) -> None:
        """Leave the spools clean."""
        for spool in self.spools:
            spares.drop(spool)

    async def commit(
        self, store: PartitionStore, action: Callable[[PartitionStore], T], *, n_bytes: int = 0
    ) -> T:
        """Run `action` on the writer thread of `store`; returns once its rows are durable.

        `n_bytes`: about what it writes.
        """
        return await self.commits.run(store, action, n_bytes=n_bytes)


@contextmanager
def encoders_and_commits(config: CollectConfig) -> Iterator[tuple[EncodePool, Commits]]:
    """What encodes a run's captures and what writes them, fit for its width and this machine.

    Opened within the event loop of the run.
    """
    wide = config.profile.wide
    with ExitStack() as stack:
        committers = [GroupCommitter() for _ in range(writers_for(wide=wide))]
        for committer in committers:
            stack.callback(committer.close)
        encoders = EncodePool(threads_for(wide=wide))
        stack.callback(encoders.close)
        if wide:
            stack.enter_context(short_turns())
        yield encoders, Commits(*committers)
