"""Flow `datagen`, deployment `collect`: one task run per partition around the collect job."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Literal

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Failed
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from datagen.collect.job import CollectJob
from datagen.config import OnLength, Rendering, collect_config
from datagen.errors import DatagenError
from flows.logs import flow_logger
from flows.progress import RunView, rates


@flow(name="datagen", flow_run_name="{run}-{mix}-{target}", retries=0, persist_result=False)
async def datagen(
    run: str = "demo",
    mix: str = "demo",
    target: str = "smollm2",
    endpoints: str = "",
    limit: NonNegativeInt = 200,
    max_new_tokens: NonNegativeInt = 0,
    temperature: float = -1.0,
    seed: NonNegativeInt = 0,
    codec: str = "plane",
    runs_dir: str = "runs",
    tokenizer: str = "",
    partition_prompts: PositiveInt = 25,
    shard_mib: PositiveInt = 256,
    spool_mib: NonNegativeInt = 0,
    concurrency: PositiveInt = 32,
    max_concurrency: NonNegativeInt = 0,
    attempts: PositiveInt = 3,
    patience_s: PositiveFloat = 300.0,
    row_timeout_s: PositiveFloat = 1800.0,
    on_length: OnLength = "keep",
    loop_tokens: NonNegativeInt = 256,
    metrics_port: NonNegativeInt = 0,
    rendering: Rendering = "auto",
    capture_mode: Literal["spool", "json"] = "spool",
    final_endpoint: str = "",
    accept_risk: str = "",
) -> dict[str, Any] | State[Any]:
    """Prompts in, verified shards of hidden states and a manifest out.

    Run it again after anything: it goes on where the disk says it was.

    Args:
        run: A name under runs_dir, or a path.
        mix: A mix by name, or the path of its .yaml.
        target: A target profile by name, or the path of its .yaml.
        endpoints: Server URLs, comma separated; empty is the profile's.
        limit: Prompts to take; 0 is the whole mix.
        max_new_tokens: Tokens per response; 0 is the profile's.
        temperature: Of the train split; negative is the profile's.
        seed: Run seed; sampling seeds derive from it.
        codec: How hidden states are stored.
        runs_dir: Where runs named without a path live.
        tokenizer: Directory of the target's tokenizer; empty finds it.
        partition_prompts: Prompts in a partition, which is one task run.
        shard_mib: Size at which a shard is sealed.
        spool_mib: Most hidden states asked for and not yet stored; 0 is 1024, or 8192 of a wide target.
        concurrency: First window of each endpoint.
        max_concurrency: Most rows at an endpoint; 0 is what its CUDA graphs hold.
        attempts: Attempts before a row is rejected.
        patience_s: Seconds to wait for a dead server.
        row_timeout_s: Most seconds a row may take.
        on_length: Answers cut at their limit are kept, rejected, or asked for longer.
        loop_tokens: Repeated tokens at an answer's end that make it a loop; 0 allows any.
        metrics_port: Where Prometheus may read, on 127.0.0.1; 0 is nowhere.
        rendering: Whose token ids contexts have: ours, the server's, or auto (ours where they agree).
        capture_mode: How hidden states travel: through the spool, or as json for small runs.
        final_endpoint: With json, a second server that hands over the final state.
        accept_risk: Preflight checks that may be red, comma separated.
    """
    log = flow_logger()
    try:
        config = collect_config(
            run=run, mix=mix, target=target, endpoints=endpoints, limit=limit,
            max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, codec=codec,
            runs_dir=runs_dir, tokenizer=tokenizer, partition_prompts=partition_prompts,
            shard_mib=shard_mib, spool_mib=spool_mib, concurrency=concurrency, attempts=attempts,
            patience_s=patience_s, max_concurrency=max_concurrency, row_timeout_s=row_timeout_s,
            on_length=on_length, loop_tokens=loop_tokens, metrics_port=metrics_port,
            rendering=rendering, capture_mode=capture_mode, final_endpoint=final_endpoint,
            accept_risk=accept_risk,
        )  # fmt: skip
        async with CollectJob.open(config, log.info) as job:
            view = RunView(job)
            async with _updating(view):
                if not job.complete:
                    await _collect_partitions(job)
                    log.info("%s", rates(job.snapshot()))
                manifest = await job.finish()
            await view.finished(manifest)
    except DatagenError as e:
        log.error("%s", e)
        return Failed(message=str(e))  # raised, it would be a page of traceback
    log.info("manifest: %s", job.manifest_path)
    return {
        "manifest": str(job.manifest_path),
        "samples": manifest.samples.collected,
        "rejected": sum(manifest.samples.rejected.values()),
    }


async def _collect_partitions(job: CollectJob) -> None:
    """One task run per pending partition, as many open as keep the servers full."""
    failures: list[DatagenError] = []

    @task(
        name="collect-partition",
        task_run_name="partition-{index:05d}",
        cache_policy=NO_CACHE,  # the disk knows what is done; Prefect must not
        persist_result=False,
        retries=0,  # rows are retried by the job, each by itself
    )
    async def collect_partition(index: int) -> dict[str, Any] | State[Any]:
        try:
            summary = await job.collect_partition(index)
        except DatagenError as e:
            failures.append(e)
            return Failed(message=str(e))
        return {"collected": summary.collected, "rejected": sum(summary.rejected.values())}

    async def one(index: int) -> None:
        try:
            await collect_partition(index)
        finally:
            job.gate.release()
        if failures:
            raise failures[0]

    try:
        async with asyncio.TaskGroup() as group:
            for index in job.pending_partitions:
                await job.gate.admit()
                group.create_task(one(index))
    except BaseExceptionGroup as errors:  # the other partitions have closed their files
        raise failures[0] if failures else errors.exceptions[0] from None


@contextlib.asynccontextmanager
async def _updating(view: RunView) -> AsyncIterator[None]:
    updater = asyncio.create_task(view.keep_updated())
    try:
        yield
    finally:
        updater.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await updater
