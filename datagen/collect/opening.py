"""What opening a run needs once: its tokenizer, its frozen plan, its settings on paper."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from datagen.config import CollectConfig
from datagen.embedded.weights import ensure_checkpoint
from datagen.errors import ConfigError, CorruptFile
from datagen.prompts.mix import Mix
from datagen.prompts.plan import build_plan
from datagen.store.atomic import write_json_atomic
from datagen.store.fingerprint import Fingerprint
from datagen.store.layout import RunLayout
from datagen.store.manifest import ManifestHeader, StatesEntry
from datagen.store.plan import Plan, write_plan
from datagen.store.states import StatesSpec
from datagen.strict import parse
from datagen.target.client import SGLangClient
from datagen.target.preflight import ServerReport
from datagen.target.profile import Profile
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


def make_run_directory(root: Path) -> None:
    """Raises ConfigError where no directory can be, or none can be written."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not os.access(root, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as e:
        raise ConfigError(
            f"the run's directory cannot be made or written: {e.strerror}",
            where=root,
            fix="give another --run or --runs-dir",
        ) from e


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


def tokenizer_source(root: Path, given: str = "") -> tuple[str | Path, Profile]:
    """Where the tokenizer of run `root` is, without asking a server, and the target's profile."""
    config = stored_config(root)
    profile = config.profile
    if given or config.tokenizer:
        return given or str(config.tokenizer), profile
    return (ensure_checkpoint() if profile.embedded else profile.model), profile


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


def stored_config(root: Path, *, endpoints: str = "", api_key: str = "") -> CollectConfig:
    """The settings that run `root` was started with; raises ConfigError.

    `endpoints`: URLs separated by commas, in place of the run's own.
    """
    path = RunLayout(root).run_yaml
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise ConfigError(
            f"its settings cannot be read: {e}",
            where=path,
            fix="run the collect command that began the run: it goes on where the disk says",
        ) from e
    if isinstance(given, dict) and isinstance(given.get("capture"), dict):
        given["capture"].pop(
            "encode_processes", None
        )  # a setting of runs begun by an earlier version
    urls = tuple(u.strip() for u in endpoints.split(",") if u.strip())
    changes = {"run": root, **({"endpoints": urls} if urls else {}), "api_key": api_key or None}
    return parse(
        {**given, **changes} if isinstance(given, dict) else given, CollectConfig, where=path
    )


def run_yaml(config: CollectConfig) -> bytes:
    """The settings as given, for people; secrets left out."""
    plain = config.model_dump(mode="json", exclude={"api_key"})
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True).encode()


def states_spec(config: CollectConfig) -> StatesSpec:
    """What a row of states is in this run."""
    profile = config.profile
    return StatesSpec(
        boundaries=profile.boundaries,
        final_norm=profile.final_norm,
        dtype=profile.capture_dtype,
        hidden_size=profile.hidden_size,
        codec=config.codec,
    )


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
        target={
            **fingerprint.fields["target"],
            "rendering": preflight["rendering"],
            "licence": profile.licence,
        },
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
