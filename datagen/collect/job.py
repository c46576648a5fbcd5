"""The collect job: plan, partitions, rows, manifest. No Prefect; flows and the CLI both drive it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datagen.collect.budget import ByteBudget
from datagen.collect.conversation import collect_prompt
from datagen.collect.descriptors import ensure_descriptors
from datagen.collect.endings import LastWord, first_cause
from datagen.collect.gate import PartitionGate
from datagen.collect.identity import (
    complete_fingerprint,
    offline_fields,
    require_same_rendering,
    with_stored_target,
)
from datagen.collect.metrics import serving_metrics
from datagen.collect.opening import (
    Notify,
    freeze_plan,
    load_renderer,
    make_run_directory,
    manifest_header,
    open_plan,
    run_yaml,
    states_spec,
)
from datagen.collect.progress import Progress, ProgressSnapshot
from datagen.collect.proof import proof_record, prove_host, prove_servers, rendered_contexts
from datagen.collect.servers import guarded, server_specs
from datagen.collect.workshop import Workshop, encoders_and_commits
from datagen.config import MIB, CollectConfig
from datagen.errors import ConfigError, Interrupted
from datagen.fanout.dispatcher import Dispatcher
from datagen.fanout.garbage import seldom_collected
from datagen.prompts.mix import Mix, load_mix, mix_digest
from datagen.store.atomic import write_atomic
from datagen.store.encoder import Encoder
from datagen.store.fingerprint import Fingerprint
from datagen.store.guards import Guards
from datagen.store.layout import RunLayout
from datagen.store.lock import RunLock
from datagen.store.manifest import Manifest, build_manifest
from datagen.store.partition import PartitionStore, PartitionSummary
from datagen.store.plan import Plan
from datagen.target.checks.suite import NAMES
from datagen.target.checks.verdict import require_known
from datagen.target.client import SGLangClient, Timeouts
from datagen.target.preflight import ServerReport, inspect_server, require_whole_prefills

REFIT_SAMPLES = 8


@dataclass(slots=True)
class CollectJob:
    """An open run. Partitions may be collected concurrently; their rows share one dispatcher."""

    config: CollectConfig
    layout: RunLayout
    plan: Plan
    fingerprint: Fingerprint
    servers: list[ServerReport]
    progress: Progress
    notify: Notify
    preflight: dict[str, Any] = field(default_factory=dict)
    manifest: Manifest | None = None
    _shop: Workshop | None = None
    _encoder: Encoder | None = None
    gate: PartitionGate = field(init=False)
    """Admits partitions: `await gate.admit()` before `collect_partition`, `gate.release()` after."""

    def __post_init__(self) -> None:
        self.gate = PartitionGate(
            self.config.partition_prompts, lambda: self._open_shop().dispatcher
        )

    @classmethod
    @asynccontextmanager
    async def open(
        cls, config: CollectConfig, notify: Notify, *, frozen: bool = False
    ) -> AsyncIterator[CollectJob]:
        """Lock the run, prove the target, freeze the plan (or load the frozen one).

        `frozen`: go on with the run's own plan; its mix, which may be gone, is not read again.
        A run that is already complete opens without contacting a server. Raises DatagenError: one
        clear line for each thing that can be wrong, before anything is written or asked.
        """
        layout = RunLayout(config.run)
        mix = None if frozen else load_mix(config.mix)
        digest = (
            Fingerprint.load(layout.fingerprint).fields["mix"] if mix is None else mix_digest(mix)
        )
        offline = offline_fields(config, digest)
        require_known(config.accept_risk, NAMES)
        make_run_directory(layout.root)
        async with AsyncExitStack() as stack:
            stack.enter_context(RunLock(layout.lock))
            stored = Fingerprint.load(layout.fingerprint) if layout.fingerprint.exists() else None
            if stored is not None:
                known = with_stored_target(offline, stored, config.rendering)
                known.require_same(stored, layout.root)
            if stored is not None and layout.manifest.exists():
                job = cls._finished(config, layout, stored, notify)
            else:
                job = await cls._prepare(config, layout, mix, offline, stored, notify, stack)
                await stack.enter_async_context(serving_metrics(job, config.metrics_port))
            yield job

    @classmethod
    def _finished(
        cls, config: CollectConfig, layout: RunLayout, stored: Fingerprint, notify: Notify
    ) -> CollectJob:
        plan = open_plan(layout, stored)
        job = cls(config, layout, plan, stored, [], Progress(time.monotonic), notify)
        job.manifest = Manifest.load(layout.manifest)
        job._count_sealed()
        notify(f"{layout.root}: complete, nothing to do")
        return job

    @classmethod
    async def _prepare(
        cls,
        config: CollectConfig,
        layout: RunLayout,
        mix: Mix | None,
        offline: dict[str, Any],
        stored: Fingerprint | None,
        notify: Notify,
        stack: AsyncExitStack,
    ) -> CollectJob:
        timeouts = Timeouts(row=config.dispatch.pace.row_timeout_s)
        clients = [
            await stack.enter_async_context(
                SGLangClient(url, timeouts=timeouts, api_key=config.api_key)
            )
            for url in config.endpoints
        ]
        any_model = "served-model" in config.accept_risk
        servers = [await inspect_server(c, config.profile, any_model=any_model) for c in clients]
        renderer = await load_renderer(config, clients[0], notify)
        specs = server_specs(config, clients, servers)
        ensure_descriptors(sum(s.limit or 0 for s in specs))
        final = None
        if config.capture.final_endpoint:
            final = await stack.enter_async_context(
                SGLangClient(
                    config.capture.final_endpoint, timeouts=timeouts, api_key=config.api_key
                )
            )
        if final is not None:
            require_whole_prefills(await inspect_server(final, config.profile))
        proof = await prove_servers(config, clients, renderer, final, notify)
        contexts = rendered_contexts(proof)
        if stored is None:
            assert mix is not None
            await asyncio.to_thread(freeze_plan, config, layout, mix, renderer, notify)
        plan = Plan.open(layout.plan)
        proof.append(prove_host(config, layout, plan, notify))
        fingerprint = complete_fingerprint(offline, servers, renderer.digest, contexts, plan.digest)
        if stored is None:
            write_atomic(layout.run_yaml, run_yaml(config))
            fingerprint.save(layout.fingerprint)
        else:
            require_same_rendering(fingerprint, stored, layout.root)
            fingerprint.require_same(stored, layout.root)
        specs = guarded(specs, config, clients, servers, contexts)
        stack.enter_context(seldom_collected())
        encoders, commits = stack.enter_context(encoders_and_commits(config))
        dispatcher = await stack.enter_async_context(
            Dispatcher(specs, config.dispatch, held=lambda: commits.crowded)
        )
        job = cls(config, layout, plan, fingerprint, servers, Progress(time.monotonic), notify)
        job._encoder = Encoder(states_spec(config), refit_after=REFIT_SAMPLES)
        job.preflight = proof_record(config, proof)
        job._shop = Workshop(
            config=config,
            renderer=renderer if contexts is None else None,
            dispatcher=dispatcher,
            commits=commits,
            encoders=encoders,
            budget=ByteBudget(config.spool_mib * MIB),
            progress=job.progress,
            guards=Guards(states_spec(config), max_fault_rate=config.max_fault_rate),
            context_length=min(s.context_length for s in servers),
            final=final,
        )
        stack.callback(job._shop.close)
        job._count_sealed()
        return job

    # -- while open ----------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """True when the manifest is written."""
        return self.manifest is not None

    @property
    def manifest_path(self) -> Path:
        """Where the manifest is, or will be."""
        return self.layout.manifest

    @property
    def pending_partitions(self) -> list[int]:
        """Partitions without their seal, in plan order."""
        return [
            i
            for i in range(self.plan.n_partitions)
            if not self.layout.partition(i).summary.exists()
        ]

    async def collect_partition(self, index: int) -> PartitionSummary:
        """Bring every row of one partition to its outcome, and seal it. Safe to repeat.

        Raises DatagenError; whatever was collected before stays.
        """
        shop = self._open_shop()
        store = await asyncio.to_thread(self._open_store, index)
        try:
            prompts = self.plan.partition(index)
            counts = store.counts()
            self.progress.restored(
                collected=counts.collected, rejects=dict(counts.rejects), prompts_done=0
            )
            stop = LastWord()
            async with asyncio.TaskGroup() as conversations:
                self.gate.opened(len(prompts))
                for prompt in prompts:
                    task = conversations.create_task(stop.of(collect_prompt, shop, store, prompt))
                    task.add_done_callback(self.gate.ended)
            stop.say()
            summary = await shop.commit(store, lambda s: s.seal(len(prompts)))
        except BaseExceptionGroup as group:
            raise first_cause(group) from None
        finally:
            await asyncio.shield(shop.commit(store, lambda s: s.close()))
        self.progress.partitions_sealed += 1
        return summary

    async def collect_all(self) -> Manifest:
        """Every pending partition, then the manifest."""
        if not self.complete:
            stop = LastWord()
            try:
                async with asyncio.TaskGroup() as group:
                    for index in self.pending_partitions:
                        await self.gate.admit()
                        if stop.stopped:
                            break
                        group.create_task(stop.of(self._collect_admitted, index))
            except BaseExceptionGroup as errors:
                raise first_cause(errors) from None
            stop.say()
        return await self.finish()

    async def _collect_admitted(self, index: int) -> None:
        try:
            await self.collect_partition(index)
        finally:
            self.gate.release()

    async def finish(self) -> Manifest:
        """Write the manifest once every partition is sealed."""
        if self.manifest is None:
            if self.pending_partitions:
                raise ConfigError(
                    f"{len(self.pending_partitions)} partitions are not sealed",
                    where=self.layout.root,
                    fix="run the collect again",
                )
            header = manifest_header(self.config, self.fingerprint, self.servers, self.preflight)
            self.manifest = await asyncio.to_thread(build_manifest, self.layout, self.plan, header)
        return self.manifest

    async def stop(self) -> None:
        """Send nothing more; rows at a server may finish within `drain_s`. What is stored stays."""
        shop = self._open_shop()
        shop.dispatcher.stop(
            Interrupted(
                "stopped on request; everything finished is on disk",
                where=self.layout.root,
                fix="run the same command again to go on",
            ),
            drain_s=self.config.drain_s,
        )

    @property
    def dispatcher(self) -> Dispatcher | None:
        """What feeds the servers; None when the run is complete."""
        return self._shop.dispatcher if self._shop else None

    def snapshot(self) -> ProgressSnapshot:
        """Counters now."""
        dispatcher = self.dispatcher
        if dispatcher is None:
            return self.progress.snapshot([])
        return self.progress.snapshot(
            dispatcher.state(),
            queue_wait_p50_s=dispatcher.queue_wait.quantile(0.5),
            loop_lag_p99_s=dispatcher.loop_lag.quantile(0.99),
        )

    # -- inside --------------------------------------------------------------------------------

    def _open_shop(self) -> Workshop:
        if self._shop is None:
            raise ConfigError("the run is complete: it has no partition to collect")
        return self._shop

    def _open_store(self, index: int) -> PartitionStore:
        return PartitionStore.open(
            self.layout.partition(index),
            fingerprint_digest=self.fingerprint.digest,
            spec=states_spec(self.config),
            shard_bytes=self.config.shard_mib * MIB,
            encoder=self._encoder,
        )

    def _count_sealed(self) -> None:
        progress, plan = self.progress, self.plan
        progress.planned, progress.prompts_total = plan.n_samples, plan.n_prompts
        progress.partitions_total = plan.n_partitions
        for index in range(plan.n_partitions):
            path = self.layout.partition(index).summary
            if path.exists():
                summary = PartitionSummary.load(path)
                progress.restored(
                    collected=summary.collected,
                    rejects=dict(summary.rejected),
                    prompts_done=summary.prompts,
                )
                progress.partitions_sealed += 1
