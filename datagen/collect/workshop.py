"""What every conversation of a run shares: servers, stores, budgets, books."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from datagen.collect.budget import ByteBudget
from datagen.collect.commits import Commits
from datagen.collect.encoding import EncodePool
from datagen.collect.progress import Progress
from datagen.config import CollectConfig
from datagen.fanout.dispatcher import Dispatcher
from datagen.fanout.lengths import LengthModel
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

    async def commit(self, store: PartitionStore, action: Callable[[PartitionStore], T]) -> T:
        """Run `action` on the writer thread; returns once its rows are durable."""
        return await self.commits.run(store, action)
