"""The servers of a run as the dispatcher takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from datagen.collect.identity import difference
from datagen.config import CollectConfig
from datagen.errors import WrongTarget
from datagen.fanout.rows import Role
from datagen.fanout.server import Proof, ServerSpec
from datagen.fanout.window import window_limit
from datagen.target.chat import TOKENIZE
from datagen.target.checks.renderings import contexts_sha256
from datagen.target.client import SGLangClient
from datagen.target.preflight import ServerReport, inspect_server

PROOF_S = 60.0  # a server that has just come back has no queue


def server_specs(
    config: CollectConfig, clients: list[SGLangClient], servers: list[ServerReport]
) -> list[ServerSpec]:
    """Each with its role, and the most rows it may hold."""
    window = config.dispatch.window
    return [
        ServerSpec(
            client,
            config.role(client.url),
            window_limit(
                window,
                max_running=report.max_running_requests,
                graph_batch=report.cuda_graph_max_bs,
            ),
        )
        for client, report in zip(clients, servers, strict=True)
    ]


def guarded(
    specs: Sequence[ServerSpec],
    config: CollectConfig,
    clients: Sequence[SGLangClient],
    servers: Sequence[ServerReport],
    contexts: str | None,
) -> list[ServerSpec]:
    """The same, each with what it must still be when it comes back after a failure.

    `contexts`: digest of what the servers make of the probe conversations, where they render the run's.
    """
    any_model = "served-model" in config.accept_risk

    def proof_of(client: SGLangClient, began_as: ServerReport, role: Role) -> Proof:
        async def require_same() -> None:
            now = await inspect_server(client, config.profile, any_model=any_model)
            unlike = difference(now, began_as)
            if unlike is None and now.context_length < began_as.context_length:
                unlike = f"context length: {now.context_length} against {began_as.context_length}"
            if unlike is None and contexts is not None and role & Role.GENERATE:
                client.chats.route = TOKENIZE  # it may be a newer release
                async with asyncio.timeout(PROOF_S):
                    rendered = await contexts_sha256(client, config.profile.thinking_kwarg)
                if rendered != contexts:
                    unlike = "what it renders of the probe conversations"
            if unlike is not None:
                raise WrongTarget(
                    f"the server came back as another one, it differs in {unlike}", where=client.url
                )

        return require_same

    return [
        replace(spec, proof=proof_of(client, report, spec.role))
        for spec, client, report in zip(specs, clients, servers, strict=True)
    ]
