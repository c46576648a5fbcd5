"""The servers of a run as the dispatcher takes them."""

from __future__ import annotations

from datagen.config import CollectConfig
from datagen.fanout.server import ServerSpec
from datagen.fanout.window import window_limit
from datagen.target.client import SGLangClient
from datagen.target.preflight import ServerReport


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
