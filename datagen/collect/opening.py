"""What opening a run needs once: its tokenizer, its frozen plan, its settings on paper."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from datagen.config import CollectConfig
from datagen.embedded.weights import ensure_checkpoint
from datagen.errors import CorruptFile
from datagen.prompts.mix import Mix
from datagen.prompts.plan import build_plan
from datagen.store.atomic import write_json_atomic
from datagen.store.fingerprint import Fingerprint
from datagen.store.layout import RunLayout
from datagen.store.manifest import ManifestHeader, StatesEntry
from datagen.store.plan import Plan, write_plan
from datagen.target.client import SGLangClient
from datagen.target.preflight import ServerReport
from datagen.target.tokens import Renderer, TemplateRenderer

Notify = Callable[[str], None]


def open_plan(layout: RunLayout, stored: Fingerprint) -> Plan:
    """The frozen plan, proven to be the one of the fingerprint. Raises CorruptFile."""
    plan = Plan.open(layout.plan)
    if plan.digest != stored.fields["plan"]:
        raise CorruptFile(
            "the plan is not the one the run was started with",
            where=layout.plan,
            fix="restore it, or collect into a new run directory",
        )
    return plan


async def load_renderer(config: CollectConfig, client: SGLangClient, notify: Notify) -> Renderer:
    """The target's tokenizer: a given directory, the embedded checkpoint, the server's, or the hub's."""
    profile = config.profile
    source: str | Path
    if config.tokenizer is not None:
        source = config.tokenizer
    elif profile.embedded:
        source = await asyncio.to_thread(ensure_checkpoint, progress=notify)
    else:
        info = await client.model_info()
        served = str(info.get("tokenizer_path") or "")
        source = served if await asyncio.to_thread(Path(served).is_dir) else profile.model
    return await asyncio.to_thread(
        TemplateRenderer,
        source,
        thinking_kwarg=profile.thinking_kwarg,
        trust_remote_code=profile.trust_remote_code,
    )


def freeze_plan(
    config: CollectConfig, layout: RunLayout, mix: Mix, renderer: Renderer, notify: Notify
) -> None:
    """Build the plan and write plan.arrow and prompts.json. Raises MixError, PromptDataError."""
    result = build_plan(
        mix,
        renderer=renderer,
        profile=config.profile,
        limit=config.limit,
        seed=config.seed,
        max_new_tokens=config.max_new_tokens,
        partition_prompts=config.partition_prompts,
        progress=notify,
    )
    write_plan(layout.plan, result.rows, {"mix": mix.name})
    write_json_atomic(layout.prompt_report, result.report.as_dict())


def run_yaml(config: CollectConfig) -> bytes:
    """The settings as given, for people; secrets left out."""
    plain = config.model_dump(mode="json", exclude={"api_key"})
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True).encode()


def manifest_header(
    config: CollectConfig,
    fingerprint: Fingerprint,
    servers: list[ServerReport],
    preflight: dict[str, Any],
) -> ManifestHeader:
    """What the job knows and the partitions do not."""
    profile = config.profile
    return ManifestHeader(
        run=config.run.name,
        code_version=version("datagen"),
        fingerprint=fingerprint.digest,
        target={**fingerprint.fields["target"], "licence": profile.licence},
        sampling=config.sampling.model_dump(mode="json"),
        settings=config.content,
        states=StatesEntry(
            boundaries=list(profile.boundaries),
            final_norm=profile.final_norm,
            dtype=profile.capture_dtype,
            hidden_size=profile.hidden_size,
            codec=config.codec,
        ),
        servers=[s.as_dict() for s in servers],
        preflight=preflight,
    )
