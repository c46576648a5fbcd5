"""The configuration of a run: composes the components' own configs, and reads flat scalars into them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from datagen.errors import ConfigError
from datagen.fanout.dispatcher import DispatchConfig
from datagen.fanout.window import WindowConfig
from datagen.strict import StrictModel, parse
from datagen.target.profile import Profile, SplitSampling, load_profile

MIB = 1 << 20


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
    limit: int | None = Field(default=None, ge=1)
    max_new_tokens: int = Field(ge=1)
    sampling: SplitSampling
    seed: int = Field(default=0, ge=0)
    codec: Literal["plane"] = "plane"
    tokenizer: str | None = None
    partition_prompts: int = Field(default=25, ge=1, le=65536)
    shard_mib: int = Field(default=256, ge=1)
    spool_mib: int = Field(default=1024, ge=1)
    """Most bytes of hidden states asked for and not yet stored."""
    drain_s: float = Field(default=60.0, ge=0)
    capture: CaptureConfig = CaptureConfig()
    dispatch: DispatchConfig = DispatchConfig()
    row_timeout_s: float = Field(default=1800.0, gt=0)
    accept_risk: tuple[str, ...] = ()
    """Checks of preflight that may be red."""
    api_key: str | None = Field(default=None, repr=False)

    @property
    def content(self) -> dict[str, Any]:
        """The settings that decide the content of rows; part of the fingerprint."""
        return {
            "limit": self.limit,
            "max_new_tokens": self.max_new_tokens,
            "sampling": self.sampling.model_dump(mode="json"),
            "seed": self.seed,
            "codec": self.codec,
            "boundaries": list(self.profile.boundaries),
            "final_norm": self.profile.final_norm,
            "capture_dtype": self.profile.capture_dtype,
            "hidden_size": self.profile.hidden_size,
            "stop_token_ids": list(self.profile.stop_token_ids),
            "thinking_kwarg": self.profile.thinking_kwarg,
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
    codec: str = "plane",
    runs_dir: str = "runs",
    tokenizer: str = "",
    partition_prompts: int = 25,
    shard_mib: int = 256,
    spool_mib: int = 1024,
    concurrency: int = 32,
    attempts: int = 3,
    patience_s: float = 300.0,
    api_key: str = "",
    capture_mode: str = "spool",
    final_endpoint: str = "",
    accept_risk: str = "",
) -> CollectConfig:
    """A run's configuration from flat scalars, as a CLI, a Makefile or a UI form gives them.

    `run`: a name under `runs_dir`, or a path. `endpoints`: URLs separated by commas; empty is the
    profile's. `limit`, `max_new_tokens`: 0 is all prompts, the profile's. `temperature`: of the
    train split, negative is the profile's. `accept_risk`: checks that may be red,
    comma separated. Raises ConfigError, ProfileError.
    """
    profile = load_profile(target)
    urls = tuple(u.strip() for u in endpoints.split(",") if u.strip()) or (profile.endpoint,)
    for url in (*urls, *([final_endpoint] if final_endpoint else [])):
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"endpoint '{url}' is no URL",
                fix="write it as http://host:port, several with commas",
            )
    sampling = profile.sampling
    if temperature >= 0:
        train = sampling.train.model_copy(update={"temperature": temperature})
        sampling = sampling.model_copy(update={"train": train})
    path = Path(run) if "/" in run else Path(runs_dir) / run
    return parse(
        {
            "run": path,
            "mix": mix,
            "profile": profile,
            "endpoints": urls,
            "limit": limit or None,
            "max_new_tokens": max_new_tokens or profile.max_new_tokens,
            "sampling": sampling,
            "seed": seed,
            "codec": codec,
            "tokenizer": tokenizer or None,
            "partition_prompts": partition_prompts,
            "shard_mib": shard_mib,
            "spool_mib": spool_mib,
            "capture": {"mode": capture_mode, "final_endpoint": final_endpoint or None},
            "dispatch": DispatchConfig(
                window=WindowConfig(initial=concurrency), attempts=attempts, patience_s=patience_s
            ),
            "accept_risk": tuple(n.strip() for n in accept_risk.split(",") if n.strip()),
            "api_key": api_key or None,
        },
        CollectConfig,
        where="collect settings",
    )
