"""The configuration of a run: composes the components' own configs, and reads flat scalars into them."""

from __future__ import annotations

from math import isnan
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from datagen.errors import ConfigError
from datagen.fanout.config import DispatchConfig
from datagen.fanout.rows import Role
from datagen.store.codecs import DEFAULT, REGISTRY
from datagen.strict import StrictModel, parse
from datagen.target.profile import Profile, SplitSampling, load_profile
from datagen.target.tokens import Rendering as Rendering

MIB = 1 << 20
SPOOL_MIB, WIDE_SPOOL_MIB = 1024, 8192
"""The wide one: 3 GB/s, half a second on their way from the request to the journal, and some to spare."""
OnLength = Literal["keep", "reject", "longer"]
"""What becomes of an answer cut at max_new_tokens: kept as it is, rejected, or asked for once more with
twice the room."""
ROLES = {"generate": Role.GENERATE, "capture": Role.CAPTURE}


def _registered(codec: str) -> str:
    if codec not in REGISTRY:
        raise ValueError(f"unknown codec '{codec}', use one of {', '.join(REGISTRY)}")
    return codec


class CaptureConfig(StrictModel):
    """How hidden states travel. `json`: in the answers of stock servers, for small runs."""

    mode: Literal["spool", "json"] = "spool"
    final_endpoint: str | None = None
    """With `json`: a second server for the final state, where the others hand over boundaries only."""

    @model_validator(mode="after")
    def _one_server_is_enough_for_the_spool(self) -> CaptureConfig:
        if self.mode == "spool" and self.final_endpoint:
            raise ValueError("final_endpoint is for mode json; the spool carries the final state")
        return self


class CollectConfig(StrictModel):
    """Everything that `datagen collect` needs. `content` names what changes the rows."""

    run: Path
    mix: str
    profile: Profile
    endpoints: tuple[str, ...] = Field(min_length=1)
    capture_only: tuple[str, ...] = ()
    generate_only: tuple[str, ...] = ()
    limit: int | None = Field(default=None, ge=1)
    max_new_tokens: int = Field(ge=1)
    sampling: SplitSampling
    seed: int = Field(default=0, ge=0)
    codec: Annotated[str, AfterValidator(_registered)] = DEFAULT
    tokenizer: str | None = None
    partition_prompts: int = Field(default=25, ge=1, le=65536)
    shard_mib: int = Field(default=256, ge=1)
    spool_mib: int = Field(default=SPOOL_MIB, ge=1)
    """Most bytes of hidden states asked for and not yet stored."""
    max_fault_rate: float = Field(default=0.05, ge=0, le=1)
    """Share of captures that guards may refuse before the run stops: the engine is at fault then."""
    drain_s: float = Field(default=60.0, ge=0)
    rendering: Rendering = "auto"
    capture: CaptureConfig = CaptureConfig()
    dispatch: DispatchConfig = DispatchConfig()
    on_length: OnLength = "keep"
    loop_tokens: int = Field(default=256, ge=0)
    """Repeated tokens at the end of an answer from which it is a loop, and rejected; 0 allows any."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Where Prometheus may read the run's metrics, on 127.0.0.1; 0 is nowhere."""
    accept_risk: tuple[str, ...] = ()
    """Checks of preflight that may be red."""
    api_key: str | None = Field(default=None, repr=False)

    def role(self, url: str) -> Role:
        """What the endpoint is asked for."""
        if url in self.capture_only:
            return Role.CAPTURE
        return Role.GENERATE if url in self.generate_only else Role.BOTH

    @property
    def content(self) -> dict[str, Any]:
        """The settings that decide the content of rows; part of the fingerprint."""
        return {
            "limit": self.limit,
            "max_new_tokens": self.max_new_tokens,
            "sampling": self.sampling.model_dump(mode="json"),
            "seed": self.seed,
            "codec": self.codec,
            "on_length": self.on_length,
            "loop_tokens": self.loop_tokens,
            "boundaries": list(self.profile.boundaries),
            "final_norm": self.profile.final_norm,
            "capture_dtype": self.profile.capture_dtype,
            "hidden_size": self.profile.hidden_size,
            "stop_token_ids": list(self.profile.stop_token_ids),
            "thinking_kwarg": self.profile.thinking_kwarg,
            **({"reasoning_end": end} if (end := self.profile.reasoning_end) else {}),
        }


def collect_config(
    *,
    run: str = "demo",
    mix: str = "demo",
    target: str = "smollm2",
    endpoints: str = "",
    limit: int = 0,
    max_new_tokens: int = 0,
    temperature: float = -1.0,
    seed: int = 0,
    codec: str = DEFAULT,
    runs_dir: str = "runs",
    tokenizer: str = "",
    partition_prompts: int = 25,
    shard_mib: int = 256,
    spool_mib: int = 0,
    concurrency: int = 32,
    max_concurrency: int = 0,
    attempts: int = 3,
    patience_s: float = 300.0,
    row_timeout_s: float = 1800.0,
    on_length: str = "keep",
    loop_tokens: int = 256,
    metrics_port: int = 0,
    api_key: str = "",
    rendering: str = "auto",
    capture_mode: str = "spool",
    final_endpoint: str = "",
    accept_risk: str = "",
) -> CollectConfig:
    """A run's configuration from flat scalars, as a CLI, a Makefile or a UI form gives them.

    `run`: a name under `runs_dir`, or a path. `endpoints`: URLs separated by commas, each serving
    both roles unless written `generate=URL` or `capture=URL`; empty is the profile's. `limit`,
    `max_new_tokens`: 0 is all prompts, the profile's. `temperature`: of the train split, negative
    is the profile's. `spool_mib`: 0 is what its width needs. `max_concurrency`: 0 keeps within each
    server's CUDA graphs, a number is taken at its word. `rendering`: auto, ours or server.
    `accept_risk`: checks that may be red, comma separated. Raises ConfigError, ProfileError.
    """
    profile = load_profile(target)
    urls, only = _endpoints(endpoints or profile.endpoint)
    if final_endpoint:
        _require_url(final_endpoint)
    sampling = profile.sampling
    if temperature >= 0:
        train = sampling.train.model_copy(update={"temperature": temperature})
        sampling = sampling.model_copy(update={"train": train})
    elif isnan(temperature):
        raise ConfigError("temperature is nan", fix="give a number; negative is the profile's")
    if run.strip() in ("", ".", ".."):
        raise ConfigError(f"'{run}' is no name of a run", fix="give a name, or a path with a '/'")
    path = Path(run) if "/" in run else Path(runs_dir) / run
    return parse(
        {
            "run": path,
            "mix": mix,
            "profile": profile,
            "endpoints": urls,
            "capture_only": only[Role.CAPTURE],
            "generate_only": only[Role.GENERATE],
            "limit": limit or None,
            "max_new_tokens": max_new_tokens or profile.max_new_tokens,
            "sampling": sampling,
            "seed": seed,
            "codec": codec,
            "tokenizer": tokenizer or None,
            "partition_prompts": partition_prompts,
            "shard_mib": shard_mib,
            "spool_mib": spool_mib or (WIDE_SPOOL_MIB if profile.wide else SPOOL_MIB),
            "rendering": rendering,
            "capture": {
                "mode": capture_mode,
                "final_endpoint": final_endpoint or None,
            },
            "dispatch": {
                "window": {
                    "initial": concurrency,
                    **(
                        {"maximum": max_concurrency, "beyond_graph": True}
                        if max_concurrency
                        else {}
                    ),
                },
                "pace": {"row_timeout_s": row_timeout_s},
                "attempts": attempts,
                "patience_s": patience_s,
            },
            "on_length": on_length,
            "loop_tokens": loop_tokens,
            "metrics_port": metrics_port,
            "accept_risk": tuple(n.strip() for n in accept_risk.split(",") if n.strip()),
            "api_key": api_key or None,
        },
        CollectConfig,
        where="collect settings",
    )


def _endpoints(text: str) -> tuple[tuple[str, ...], dict[Role, tuple[str, ...]]]:
    """The URLs, and those that serve one role only. Raises ConfigError."""
    roles: dict[str, Role] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, rest = item.partition("=")
        url, role = (rest, ROLES[name]) if equals and name in ROLES else (item, Role.BOTH)
        _require_url(url)
        url = url.rstrip("/")
        roles[url] = roles.get(url, Role(0)) | role
    for needed in ROLES.values():
        if not any(needed & role for role in roles.values()):
            name = next(n for n, r in ROLES.items() if r is needed)
            raise ConfigError(
                f"no endpoint serves the role '{name}'", where=text, fix=f"add one as {name}=URL"
            )
    only = {r: tuple(u for u, role in roles.items() if role is r) for r in ROLES.values()}
    return tuple(roles), only


def _require_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port out of range, half an IPv6 address
        known = False
    if not known or " " in url:
        raise ConfigError(
            f"endpoint '{url}' is no URL",
            fix="write it as http://host:port, several with commas, and generate=URL or "
            "capture=URL where a server has one role",
        )
