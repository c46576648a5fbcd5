"""`make up` runs this: one process that registers every deployment and runs what is asked of it."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import Any

import httpx
from prefect import Flow
from prefect.client.schemas.objects import (
    ConcurrencyLimitConfig,
    ConcurrencyLimitStrategy,
)
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import TerminationSignal
from prefect.runner import Runner
from prefect.settings import PREFECT_API_URL
from prefect.types.entrypoint import EntrypointType

from datagen.errors import DatagenError, PrefectUnavailable
from flows.automations import register
from flows.collect import datagen
from flows.evaluate import evaluate
from flows.finetune import finetune
from flows.pipeline import pipeline
from flows.probe import probe
from flows.services import SERVING


def require_server() -> None:
    """Raise PrefectUnavailable unless the Prefect server answers."""
    url = PREFECT_API_URL.value()
    if not url:
        raise PrefectUnavailable(
            "no Prefect server is configured",
            fix="run `make up`, and run this from the repository's root",
        )
    try:
        httpx.get(f"{url}/health", timeout=5).raise_for_status()
    except httpx.HTTPError as e:
        raise PrefectUnavailable(
            f"the Prefect server does not answer ({type(e).__name__})",
            where=url,
            fix="run `make up`",
        ) from e


async def deployments(endpoints: str) -> list[RunnerDeployment]:
    """Every deployment. `endpoints`: where runs find the target unless they say otherwise.

    The limit of one run is the deployment's, so it holds across restarts of this process.
    """
    target: dict[str, Any] = {"endpoints": endpoints} if endpoints else {}
    return [
        await _deployment(
            datagen,
            "collect",
            "Prompts in, verified shards of hidden states and a manifest out.",
            target,
        ),
        await _deployment(finetune, "train", "A manifest in, a drafter that SGLang loads out."),
        await _deployment(
            evaluate, "heldout", "A manifest and a drafter in, accept_len and a verdict out."
        ),
        await _deployment(
            pipeline,
            "full",
            "Prompts in, the answer out: collect, finetune, evaluate, report.",
            target,
        ),
        await _deployment(
            probe, "probe", "Short training on nested subsets: can the full run reach break-even?"
        ),
    ]


async def _deployment(
    flow: Flow[..., Any], name: str, description: str, parameters: dict[str, Any] | None = None
) -> RunnerDeployment:
    """One run at a time; a second waits."""
    return await flow.ato_deployment(
        name=name,
        description=description,
        tags=["datagen"],
        parameters=parameters,
        concurrency_limit=ConcurrencyLimitConfig(
            limit=1, collision_strategy=ConcurrencyLimitStrategy.ENQUEUE
        ),
        entrypoint_type=EntrypointType.MODULE_PATH,
    )


async def serve(endpoints: str) -> None:
    """Serve until SIGTERM, which cancels the runs in progress: they flush, and resume next time."""
    require_server()
    runner = Runner(pause_on_shutdown=False)
    ids = {
        f"{d.flow_name}/{d.name}": await runner.aadd_deployment(d)
        for d in await deployments(endpoints)
    }
    await register(train=ids["finetune/train"], evaluate=ids["evaluate/heldout"])
    print(SERVING, flush=True)
    await runner.start()


def main() -> None:
    """Entry point of `python -m flows.serve`: one line for a known error, exit 1."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of the flow runs; see `datagen collect`
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoints", default="", help="of the target, comma separated")
    try:
        asyncio.run(serve(parser.parse_args().endpoints))
    except (KeyboardInterrupt, TerminationSignal):
        print("stopped", flush=True)
    except DatagenError as e:
        sys.exit(f"datagen: error: {e}")


if __name__ == "__main__":
    main()
