"""Serve, collect, verify, status, summary: each reads its arguments, calls the job, and prints."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from datagen.cli.app import app, err, out, partition_bar
from datagen.errors import ConfigError, Interrupted

if TYPE_CHECKING:
    from datagen.collect.job import CollectJob
    from datagen.config import CollectConfig
    from datagen.store.manifest import Manifest

RunArgument = Annotated[str, typer.Argument(help="A run's name under runs/, or its directory.")]
RunsDir = Annotated[str, typer.Option(help="Where runs named without a path live.")]


@app.command()
def serve(
    target: Annotated[str, typer.Option(help="smollm2, or a checkpoint directory.")] = "smollm2",
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to bind.")] = 30000,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    threads: Annotated[int, typer.Option(help="Compute threads; 0 is one per core.")] = 0,
    spool_dir: Annotated[str, typer.Option(help="Where captures are published.")] = "",
    boundaries: Annotated[str, typer.Option(help="Layers to capture, e.g. 2,15,27.")] = "",
    max_running_requests: Annotated[int, typer.Option(help="Requests decoded together.")] = 32,
    drafter: Annotated[str, typer.Option(help="A drafter checkpoint to speculate with.")] = "",
    draft_steps: Annotated[int, typer.Option(help="Tokens drafted per verify cycle.")] = 3,
) -> None:
    """Serve the embedded target: SGLang's API over a real small model, on this CPU."""
    # libgomp reads this when torch loads it. Threads that spin for long between kernels take the core
    # from the collector; threads that sleep at once cost half the speed of an idle machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    from datagen.embedded.server import serve as serve_target

    try:
        layers = tuple(int(b) for b in boundaries.split(",")) if boundaries else None
    except ValueError:
        raise ConfigError(
            f"--boundaries '{boundaries}' are no layer numbers", fix="write them as 2,15,27"
        ) from None
    serve_target(
        target=target,
        host=host,
        port=port,
        dtype=dtype,
        threads=threads or None,
        spool_dir=Path(spool_dir) if spool_dir else None,
        boundaries=layers,
        max_running_requests=max_running_requests,
        drafter=Path(drafter) if drafter else None,
        draft_steps=draft_steps,
    )


@app.command()
def collect(
    run: Annotated[str, typer.Option(help="A name under --runs-dir, or a path.")] = "demo",
    mix: Annotated[str, typer.Option(help="A mix by name, or the path of its .yaml.")] = "demo",
    target: Annotated[str, typer.Option(help="A profile by name, or its .yaml.")] = "smollm2",
    endpoints: Annotated[str, typer.Option(help="Server URLs, comma separated.")] = "",
    limit: Annotated[int, typer.Option(help="Prompts to take; 0 is the whole mix.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(help="Per response; 0 is the profile's.")] = 0,
    temperature: Annotated[float, typer.Option(help="Of the train split; -1: profile's.")] = -1.0,
    seed: Annotated[int, typer.Option(help="Run seed: sampling seeds derive from it.")] = 0,
    codec: Annotated[str, typer.Option(help="plane, ipc-zstd or mantissa-4 (lossy).")] = "plane",
    runs_dir: RunsDir = "runs",
    tokenizer: Annotated[str, typer.Option(help="Directory of the target's tokenizer.")] = "",
    partition_prompts: Annotated[int, typer.Option(help="Prompts in a partition.")] = 25,
    shard_mib: Annotated[int, typer.Option(help="Size at which a shard is sealed.")] = 256,
    spool_mib: Annotated[int, typer.Option(help="Most states in flight; 0: by width.")] = 0,
    concurrency: Annotated[int, typer.Option(help="First window of each endpoint.")] = 32,
    max_concurrency: Annotated[
        int, typer.Option(help="Most rows at an endpoint; 0: what its CUDA graphs hold.")
    ] = 0,
    attempts: Annotated[int, typer.Option(help="Attempts before a row is rejected.")] = 3,
    patience_s: Annotated[float, typer.Option(help="Wait for a dead server.")] = 300.0,
    row_timeout_s: Annotated[float, typer.Option(help="Most a row may take.")] = 1800.0,
    on_length: Annotated[
        str, typer.Option(help="Answers cut at their limit: keep, reject, or ask longer.")
    ] = "keep",
    loop_tokens: Annotated[
        int, typer.Option(help="Repetition that is no answer; 0: any is.")
    ] = 256,
    metrics_port: Annotated[int, typer.Option(help="Prometheus metrics; 0 is off.")] = 0,
    api_key: Annotated[str, typer.Option(envvar="DATAGEN_API_KEY", help="Bearer token.")] = "",
    rendering: Annotated[str, typer.Option(help="Whose ids: ours, server, or auto.")] = "auto",
    capture_mode: Annotated[str, typer.Option(help="spool, or json for small runs.")] = "spool",
    final_endpoint: Annotated[
        str, typer.Option(help="json: a second server that hands over the final state.")
    ] = "",
    accept_risk: Annotated[
        list[str] | None, typer.Option(help="A preflight check that may be red; repeatable.")
    ] = None,
) -> None:
    """Collect a run without Prefect: plan, responses, hidden states, manifest. Resumes itself."""
    # numpy reads this when it loads. On the cores of an embedded target, threads of a second BLAS that
    # spin for each other made preflight's products 15 times dearer.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from datagen.config import collect_config

    config = collect_config(
        run=run, mix=mix, target=target, endpoints=endpoints, limit=limit,
        max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, codec=codec,
        runs_dir=runs_dir, tokenizer=tokenizer, partition_prompts=partition_prompts,
        shard_mib=shard_mib, spool_mib=spool_mib, concurrency=concurrency, attempts=attempts,
        patience_s=patience_s, api_key=api_key, max_concurrency=max_concurrency,
        row_timeout_s=row_timeout_s, on_length=on_length, loop_tokens=loop_tokens,
        metrics_port=metrics_port, rendering=rendering, capture_mode=capture_mode,
        final_endpoint=final_endpoint, accept_risk=",".join(accept_risk or ()),
    )  # fmt: skip
    import uvloop

    manifest = uvloop.run(collect_watched(config))
    print_summary(manifest, config.run)


async def collect_watched(config: CollectConfig, *, frozen: bool = False) -> Manifest:
    """Run the job under a progress line; the first signal drains, the second aborts."""
    from datagen.collect.job import CollectJob

    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    async with CollectJob.open(
        config, lambda text: err.print(text, highlight=False), frozen=frozen
    ) as job:
        stopping: list[asyncio.Task[None]] = []

        def interrupted() -> None:
            if stopping or job.complete:
                assert task is not None
                task.cancel()
            else:
                err.print(
                    f"stopping: rows in flight may finish for {config.drain_s:.0f} s; "
                    "once more to abort now"
                )
                stopping.append(loop.create_task(job.stop()))

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupted)
        watcher = loop.create_task(_watch(job))
        try:
            return await job.collect_all()
        except asyncio.CancelledError:
            raise Interrupted(
                "aborted on request; everything committed is on disk",
                where=config.run,
                fix="run the same command again to go on",
            ) from None
        finally:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher


@app.command()
def verify(
    run: RunArgument = "demo",
    runs_dir: RunsDir = "runs",
    quick: Annotated[bool, typer.Option(help="Checksums only.")] = False,
    workers: Annotated[int, typer.Option(help="Partitions read at once; 0: one a core.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Re-read everything a run stored, and prove it: exit 1 names the file and row of any fault."""
    from datagen.store.verify import verify_run

    root = run_directory(run, runs_dir)
    with partition_bar(f"verifying {root}") as progress:
        report = verify_run(root, quick=quick, workers=workers or None, progress=progress)
    if as_json:
        out.print_json(json.dumps(report.as_dict()))
    else:
        table = Table("check", "result", title=f"verify {root}", title_justify="left")
        for name, result in report.table_rows():
            table.add_row(name, result)
        out.print(table)
    for fault in report.faults:
        err.print(f"[red]fault[/] {fault}", highlight=False, soft_wrap=True)
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def status(run: RunArgument = "demo", runs_dir: RunsDir = "runs") -> None:
    """Counts of a run from its journals; safe beside a live collect."""
    from datagen.store.run_status import run_status

    table = Table("what", "count", title=str(run_directory(run, runs_dir)), title_justify="left")
    for name, value in run_status(run_directory(run, runs_dir)).table_rows():
        table.add_row(name, value)
    out.print(table)


def run_directory(run: str, runs_dir: str) -> Path:
    """A run by its name under `runs_dir`, or by its path."""
    return Path(run) if "/" in run else Path(runs_dir) / run


async def _watch(job: CollectJob) -> None:
    """One progress line, redrawn on a terminal, or printed every ten seconds elsewhere."""
    if err.is_terminal:
        with err.status("collecting") as view:
            while True:
                now = job.snapshot()
                view.update("\n  ".join([now.line(), *now.endpoint_lines()]))
                await asyncio.sleep(0.5)
    while True:
        await asyncio.sleep(10)
        err.print(job.snapshot().line(), highlight=False, soft_wrap=True)


def print_summary(manifest: Manifest, root: Path) -> None:
    """What was collected, its size, and where the hand-off lies."""
    samples = manifest.samples
    rejects = ", ".join(f"{n} {r}" for r, n in samples.rejected.items()) or "none"
    tokens = sum(s.tokens_captured for s in manifest.splits.values())
    generated = sum(s.tokens_generated for s in manifest.splits.values())
    ratio = manifest.raw_bytes / manifest.stored_bytes if manifest.stored_bytes else 0.0
    table = Table("what", "value", title=f"run {manifest.run}", title_justify="left")
    table.add_row("prompts", f"{manifest.prompts:,}")
    table.add_row("samples collected", f"{samples.collected:,} of {samples.planned:,} planned")
    table.add_row("rejected", rejects)
    table.add_row("tokens", f"{generated:,} generated, {tokens:,} with states")
    table.add_row(
        "states",
        f"{manifest.stored_bytes / 1e6:,.1f} MB stored, {manifest.raw_bytes / 1e6:,.1f} MB raw "
        f"({ratio:.3f}x)",
    )
    table.add_row("manifest", str(root / "manifest.json"))
    out.print(table)


@app.command()
def summary(run: RunArgument = "demo", runs_dir: RunsDir = "runs") -> None:
    """Print what a finished run holds, from its manifest."""
    from datagen.store.manifest import Manifest

    root = run_directory(run, runs_dir)
    print_summary(Manifest.load(root / "manifest.json"), root)
