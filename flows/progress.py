"""Shows a run in the Prefect UI. The UI may fail at any time; the data never waits for it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable
from typing import Any, TypeVar
from uuid import UUID

from prefect.artifacts import (
    acreate_markdown_artifact,
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)
from prefect.events import emit_event

from datagen.collect.job import CollectJob
from datagen.collect.progress import ProgressSnapshot, format_bytes, format_seconds
from datagen.store.manifest import Manifest
from flows.automations import MANIFEST_WRITTEN
from flows.logs import flow_logger

T = TypeVar("T")
UI_TIMEOUT_S = 5.0
UPDATE_EVERY_S = 10.0
LOG_EVERY = 3  # updates
MAX_TABLE_ROWS = 500


class RunView:
    """The artifacts of one collect run. Every call is bounded in time and swallows no data error."""

    def __init__(self, job: CollectJob) -> None:
        self._job = job
        self._artifact: UUID | None = None
        self._complained = False

    async def keep_updated(self) -> None:
        """Update the progress artifact until cancelled, at most every ten seconds."""
        for n in itertools.count():
            await self.update()
            if n % LOG_EVERY == 1:
                flow_logger().info("%s", self._job.snapshot().line())
            await asyncio.sleep(UPDATE_EVERY_S)

    async def update(self) -> None:
        """Send the counters as they are now."""
        now = self._job.snapshot()
        shown = "\n\n".join([now.line(), *now.endpoint_lines()])
        if self._artifact is None:
            self._artifact = await self._guarded(
                acreate_progress_artifact(
                    progress=now.percent, key="collect-progress", description=shown
                )
            )
        else:
            await self._guarded(
                aupdate_progress_artifact(self._artifact, progress=now.percent, description=shown)
            )

    async def finished(self, manifest: Manifest) -> None:
        """The table of shards, the run summary, and the event that others can wait for."""
        await self.update()
        shards: list[dict[str, Any]] = [
            {
                "split": split,
                "shard": f.path,
                "samples": f.rows,
                "tokens": f.tokens,
                "MB": round(f.bytes / 1e6, 2),
                "sha256": f.sha256[:16],
            }
            for split, entry in manifest.splits.items()
            for f in entry.states
        ]
        shown = shards[:MAX_TABLE_ROWS]
        await self._guarded(
            acreate_table_artifact(
                key="shards",
                table=shown,
                description=f"{len(shown):,} of {len(shards):,} shards of hidden states",
            )
        )
        await self._guarded(
            acreate_markdown_artifact(
                key="run-summary",
                markdown=summary_markdown(manifest, str(self._job.manifest_path.resolve())),
                description=f"What run {manifest.run} holds",
            )
        )
        await self._guarded(self._emit_manifest_written(manifest))

    async def _emit_manifest_written(self, manifest: Manifest) -> None:
        await asyncio.to_thread(
            emit_event,
            MANIFEST_WRITTEN,
            resource={
                "prefect.resource.id": f"datagen.manifest.{manifest.run}",
                "prefect.resource.name": manifest.run,
            },
            payload={
                "manifest": str(self._job.manifest_path.resolve()),
                "samples": manifest.samples.collected,
                "rejected": sum(manifest.samples.rejected.values()),
                "stored_bytes": manifest.stored_bytes,
            },
        )

    async def _guarded(self, call: Awaitable[T]) -> T | None:
        """Await a UI call for a few seconds; a failure is logged once, and costs only the picture."""
        try:
            return await asyncio.wait_for(call, UI_TIMEOUT_S)
        except Exception as e:  # noqa: BLE001 - whatever the UI throws, data goes on
            if not self._complained:
                flow_logger().warning("the Prefect UI is not updated (data goes on): %r", e)
                self._complained = True
            return None


def rates(now: ProgressSnapshot) -> str:
    """What this session did, and how fast."""
    per_s = 1 / max(now.elapsed_s, 1e-9)
    return (
        f"in {format_seconds(now.elapsed_s)}: {now.tokens_generated * per_s:,.0f} tok/s generated, "
        f"{now.tokens_captured * per_s:,.0f} tok/s captured, "
        f"{format_bytes(now.raw_bytes * per_s)}/s of states"
    )


def summary_markdown(manifest: Manifest, path: str) -> str:
    """The run card: what was collected, from what, and where it lies."""
    samples = manifest.samples
    rejected = ", ".join(f"{n:,} {r}" for r, n in samples.rejected.items()) or "none"
    generated = sum(s.tokens_generated for s in manifest.splits.values())
    captured = sum(s.tokens_captured for s in manifest.splits.values())
    ratio = manifest.raw_bytes / manifest.stored_bytes if manifest.stored_bytes else 0.0
    rows = [
        ("target", f"{manifest.target['model']} ({manifest.target['dtype']})"),
        (
            "boundaries",
            f"{manifest.states.boundaries} and the {manifest.states.final_norm}-norm final",
        ),
        ("prompts", f"{manifest.prompts:,}"),
        ("samples planned", f"{samples.planned:,}"),
        ("samples collected", f"{samples.collected:,}"),
        ("samples rejected", rejected),
        ("tokens generated", f"{generated:,}"),
        ("tokens with states", f"{captured:,}"),
        ("stored", f"{manifest.stored_bytes / 1e6:,.1f} MB, {ratio:.3f}x below raw"),
        ("manifest", f"`{path}`"),
        ("fingerprint", f"`{manifest.fingerprint[:16]}`"),
    ]
    splits = [
        f"| {name} | {s.prompts:,} | {s.samples.collected:,} | {len(s.states)} |"
        for name, s in manifest.splits.items()
    ]
    return "\n".join(
        [
            f"# Run {manifest.run}",
            "",
            "| | |",
            "|-|-|",
            *(f"| {name} | {value} |" for name, value in rows),
            "",
            "| split | prompts | samples | shards |",
            "|-|-|-|-|",
            *splits,
        ]
    )
