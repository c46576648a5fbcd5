"""Preflight of a run: which checks of which servers, from its configuration; and what they leave behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np

from datagen.collect.opening import load_renderer
from datagen.config import MIB, CollectConfig
from datagen.embedded.weights import ensure_checkpoint
from datagen.errors import EndpointDown, PreflightRed
from datagen.fanout.rows import Role
from datagen.prompts.estimate import CODEC_RATIOS, USUAL_ANSWER_TOKENS
from datagen.store.layout import RunLayout
from datagen.store.plan import Plan
from datagen.target.checks.host import check_disk, check_files
from datagen.target.checks.subject import Effort, Subject
from datagen.target.checks.suite import HOST_CHECKS, check_server, named
from datagen.target.checks.verdict import ServerChecks, require_green, require_known
from datagen.target.client import SGLangClient, Timeouts
from datagen.target.tokens import Renderer
from datagen.target.weights import Checkpoint

Notify = Callable[[str], None]
RenderedBy = Literal["ours", "server"]
HERE = "this machine"
WINDOW_FILES = 2  # of a request in flight: its socket, and a spool file for a moment


async def prove_servers(
    config: CollectConfig,
    clients: Sequence[SGLangClient],
    renderer: Renderer,
    final: SGLangClient | None,
    notify: Notify,
) -> list[ServerChecks]:
    """Check every server, and tell the results. Raises PreflightRed for a risk not accepted."""
    places = await check_servers(config, clients, renderer, final, None)
    for place in places:
        notify(place.line())
        for result in place.reds():
            if result.name in config.accept_risk:
                notify(f"{place.where}: risk accepted: [{result.name}] {result.measured}")
    require_green(places, config.accept_risk)
    return places


def prove_host(
    config: CollectConfig, layout: RunLayout, plan: Plan, notify: Notify
) -> ServerChecks:
    """Check this machine for a planned run. Raises PreflightRed for a risk not accepted."""
    place = check_host(config, layout, plan)
    for result in place.reds():
        if result.name in config.accept_risk:
            notify(f"risk accepted: [{result.name}] {result.measured}")
    require_green([place], config.accept_risk)
    return place


async def check_servers(
    config: CollectConfig,
    clients: Sequence[SGLangClient],
    renderer: Renderer,
    final: SGLangClient | None,
    effort: Effort | None,
) -> list[ServerChecks]:
    """All checks of all servers, side by side; red ones are in the results."""
    return list(
        await asyncio.gather(
            *(_checked(config, client, renderer, final, effort) for client in clients)
        )
    )


def check_host(config: CollectConfig, layout: RunLayout, plan: Plan | None) -> ServerChecks:
    """Room and descriptors for the run."""
    began = time.monotonic()
    needed = None if plan is None else max(plan_bytes(config, plan) - stored_bytes(layout), 0)
    in_flight = config.dispatch.window.initial * len(config.endpoints)
    checks = {
        "disk": lambda: check_disk(layout.root, needed),
        "files": lambda: check_files(WINDOW_FILES * in_flight),
    }
    results = tuple(named(name, checks[name]) for name in HOST_CHECKS)
    return ServerChecks(HERE, results, time.monotonic() - began)


def plan_bytes(config: CollectConfig, plan: Plan) -> int:
    """Stored bytes that a plan is expected to give: every turn's context and answer."""
    turns, prompts, most = (
        plan.column(name).to_numpy().astype(np.float64)
        for name in ("n_turns", "prompt_tokens", "max_new_tokens")
    )
    answers = np.minimum(most, USUAL_ANSWER_TOKENS)
    tokens = float((prompts * (turns + 1) / 2 + answers * turns * (turns + 1) / 2).sum())
    return round(tokens * config.profile.bytes_per_token / CODEC_RATIOS[config.codec])


def stored_bytes(layout: RunLayout) -> int:
    """Bytes of states that a run already holds."""
    return sum(f.stat().st_size for f in layout.root.glob("partitions/*/states-*"))


def rendering_of(places: Sequence[ServerChecks]) -> RenderedBy:
    """Who renders the contexts of the run. Raises PreflightRed when its servers render differently."""
    unlike = disagreement(places)
    if unlike is not None:
        raise unlike
    return "server" if any(p.rendering == "server" for p in places) else "ours"


def rendered_contexts(places: Sequence[ServerChecks]) -> str | None:
    """Digest of what the servers of the run make of the probe conversations; None where we render.

    Raises PreflightRed as `rendering_of`.
    """
    if rendering_of(places) == "ours":
        return None
    return next(p.contexts_sha256 for p in places if p.contexts_sha256 is not None)


def disagreement(places: Sequence[ServerChecks]) -> PreflightRed | None:
    """Why servers cannot render the contexts of one run: two of them are not proven to do it alike."""
    asked = [p for p in places if p.rendering is not None]
    if all(p.rendering == "ours" for p in asked):
        return None
    known = [p for p in asked if p.rendered_sha256 is not None]
    for place in asked:
        if place.rendered_sha256 is None and place.rendering == "ours":
            found = (
                "it tells no prompt ids, so nothing proves that it renders as the other servers do"
            )
        elif known and place.rendered_sha256 not in (None, known[0].rendered_sha256):
            found = "its chat endpoint renders the probe conversations otherwise than "
            found += f"{known[0].where} does"
        elif place.contexts_sha256 != asked[0].contexts_sha256:
            found = "for a run it renders the probe conversations otherwise than "
            found += f"{asked[0].where} does"
        else:
            continue
        return PreflightRed(
            found,
            where=place.where,
            fix="serve all endpoints with one version of SGLang and one chat template",
        )
    return None


def proof_record(config: CollectConfig, places: Sequence[ServerChecks]) -> dict[str, Any]:
    """What the manifest keeps of preflight."""
    red = {r.name for p in places for r in p.reds()}
    return {
        "accepted_risks": sorted(red & set(config.accept_risk)),
        "rendering": rendering_of(places),
        "places": [p.as_dict() for p in places],
    }


async def preflight(
    config: CollectConfig, notify: Notify, *, effort: Effort, names: Sequence[str]
) -> list[ServerChecks]:
    """All checks of a configuration, of its servers and of this machine; nothing is written.

    Raises DatagenError for what cannot be asked at all: no tokenizer, an unknown risk.
    """
    require_known(config.accept_risk, names)
    layout = RunLayout(config.run)
    async with AsyncExitStack() as stack:
        timeouts = Timeouts(row=config.dispatch.pace.row_timeout_s)

        async def opened(url: str) -> SGLangClient:
            client = SGLangClient(url, timeouts=timeouts, api_key=config.api_key)
            return await stack.enter_async_context(client)

        clients = [await opened(url) for url in config.endpoints]
        final_url = config.capture.final_endpoint
        final = await opened(final_url) if final_url else None
        renderer = await load_renderer(config, clients[0], notify)
        places = await check_servers(config, clients, renderer, final, effort)
    plan = Plan.open(layout.plan) if layout.plan.exists() else None
    return [*places, check_host(config, layout, plan)]


async def _checked(
    config: CollectConfig,
    client: SGLangClient,
    renderer: Renderer,
    final: SGLangClient | None,
    effort: Effort | None,
) -> ServerChecks:
    subject = Subject(
        client=client,
        profile=config.profile,
        renderer=renderer,
        mode=config.capture.mode,
        final=final,
        checkpoint=await _checkpoint(config, client),
        spool_bytes=config.spool_mib * MIB,
        captures=bool(config.role(client.url) & Role.CAPTURE),
        generates=bool(config.role(client.url) & Role.GENERATE),
        rendering=config.rendering,
    )
    return await check_server(subject, effort)


async def _checkpoint(config: CollectConfig, client: SGLangClient) -> Path | None:
    """The target's weights on this machine: the server's own path, the embedded ones, or beside the
    tokenizer."""
    try:
        served = Path(str((await client.model_info()).get("model_path") or "-"))
    except EndpointDown:
        return None  # the suite says so
    places = [served]
    if config.profile.embedded:
        places.append(await asyncio.to_thread(ensure_checkpoint))
    if config.tokenizer:
        places.append(Path(config.tokenizer))
    return next((p for p in places if Checkpoint.found(p) is not None), None)
