"""All checks in the order they are told, and how they are run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from datagen.errors import EndpointDown
from datagen.target.checks import answers, captured, rendering, served, states
from datagen.target.checks.probes import Evidence, gather_evidence
from datagen.target.checks.subject import Effort, Subject, fitted, usual_effort
from datagen.target.checks.verdict import Finding, Result, ServerChecks, Skipped

Check = Callable[[Subject, Evidence], Finding]
REACHABLE = "reachable"
CHECKS: dict[str, Check] = {
    "version": served.check_version,
    "served-model": served.check_served_model,
    "dimensions": served.check_dimensions,
    "tokenizer": served.check_tokenizer,
    "no-drafter": served.check_no_drafter,
    "generates": answers.check_generates,
    "plugin": captured.check_plugin,
    "width": captured.check_width,
    "spool": captured.check_spool,
    "clock": captured.check_clock,
    "rows": captured.check_rows,
    "values": captured.check_values,
    "boundaries": states.check_boundaries,
    "alignment": states.check_alignment,
    "final-state": states.check_final_state,
    "batch": captured.check_batch,
    "parity": answers.check_parity,
    "stop-token": answers.check_stop_token,
    "thinking": rendering.check_thinking,
    "rendering": rendering.check_rendering,
    "throughput": answers.check_throughput,
}
HOST_CHECKS = ("disk", "files")
NAMES = (REACHABLE, *CHECKS, *HOST_CHECKS)


async def check_server(subject: Subject, effort: Effort | None = None) -> ServerChecks:
    """Probe one server and judge it; a server that does not answer is a red check, not an error.

    `effort`: None is what is usual at the start of a run.
    """
    began = time.monotonic()
    try:
        info, model = await subject.client.server_info(), await subject.client.model_info()
    except EndpointDown as e:
        down = Result(REACHABLE, "red", e.what, "an answer", e.fix)
        rest = [Result(n, "skipped", "the server does not answer", "", None) for n in CHECKS]
        return ServerChecks(subject.client.url, (down, *rest), time.monotonic() - began)
    subject = replace(subject, effort=fitted(effort or usual_effort(info), info))
    found = await gather_evidence(subject, info, model)
    results = [Result(REACHABLE, "ok", subject.client.url, "an answer", None)]
    for name, check in CHECKS.items():
        results.append(await asyncio.to_thread(named, name, lambda c=check: c(subject, found)))  # type: ignore[misc]
    plain = found.captures.get("plain")
    renders = rendering.chosen(subject, found)
    if subject.rendering == "auto" and any(
        r.name == "rendering" and r.status == "red" for r in results
    ):
        renders = "ours"  # a run goes on only where that risk is accepted
    return ServerChecks(
        where=subject.client.url,
        results=tuple(results),
        seconds=time.monotonic() - began,
        speeds=answers.speeds(found),
        captured_tokens=len(plain.ids) if plain is not None and plain.bits is not None else 0,
        rendering=renders if subject.generates else None,
        rendered_sha256=rendering.digest(found) if subject.generates else None,
        contexts_sha256=rendering.contexts_digest(found) if subject.generates else None,
    )


def named(name: str, check: Callable[[], Finding]) -> Result:
    """The result of one check."""
    try:
        found = check()
    except Skipped as e:
        return Result(name, "skipped", str(e), "", None)
    return Result(name, found.status, found.measured, found.expected, found.fix)
