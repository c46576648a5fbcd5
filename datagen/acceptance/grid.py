"""Which servers a grid measures: a list of launch profiles, each with its own draft settings.

A grid file is YAML (unknown keys are errors):

    python: /opt/sglang/bin/python     # of SGLang's environment; empty: this one
    model_path: /models/Kimi-K2.5      # empty: the profile's model by its name
    together: false                    # whether the host holds baseline and drafter at once
    start_s: 1800                      # patience until a server answers
    baseline: {arguments: [--cuda-graph-max-bs-decode 64]}
    settings:
      - {name: k2, steps: 2}
      - {name: k3-nccl, steps: 3, environment: {NCCL_P2P_LEVEL: PHB}}
      - {name: tree, steps: 5, topk: 4, draft_tokens: 8}
      - {name: other-host, url: "http://10.0.0.7:30000"}

A setting is a server that is started here, from the target's own `launch.evaluate` with these flags
behind it, or one that runs already (`url`). `1,2,3` in place of a file is a grid of chains.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from pydantic import Field, field_serializer, model_validator

from datagen.acceptance.live import BASELINE
from datagen.errors import ConfigError
from datagen.strict import StrictModel, load_yaml, parse
from datagen.target.environment import is_secret

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,39}$"
HIDDEN = "(not recorded)"


class ServerSpec(StrictModel):
    """A server that runs (`url`), or what is added to the profile's launch."""

    url: str | None = None
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default_factory=dict)

    @field_serializer("environment")
    def _without_secrets(self, environment: dict[str, str]) -> dict[str, str]:
        """What is written down of it."""
        return {k: HIDDEN if is_secret(k) else v for k, v in environment.items()}

    @model_validator(mode="after")
    def _one_origin(self) -> ServerSpec:
        if self.url is not None and (self.arguments or self.environment):
            raise ValueError("a server that runs already (url) takes no arguments or environment")
        return self


class Setting(ServerSpec):
    """A server with the drafter. `draft_tokens`: SGLang's num_draft_tokens, K + 1 for a chain."""

    name: str = Field(pattern=NAME)
    steps: int | None = Field(default=None, ge=1, le=64)
    topk: int = Field(default=1, ge=1)
    draft_tokens: int | None = Field(default=None, ge=2)

    @model_validator(mode="after")
    def _fits(self) -> Setting:
        if self.url is None and self.steps is None:
            raise ValueError(
                f"setting '{self.name}' needs steps (or the url of a server that runs)"
            )
        if self.steps is not None and self.topk == 1:
            if self.draft_tokens not in (None, self.steps + 1):
                raise ValueError(f"setting '{self.name}': a chain of {self.steps} steps has "
                                 f"{self.steps + 1} draft tokens")  # fmt: skip
        elif self.steps is not None and self.draft_tokens is None:
            raise ValueError(f"setting '{self.name}': a tree needs draft_tokens")
        return self

    def flags(self) -> list[str]:
        """SGLang's flags of the draft settings; they override those of the profile before them."""
        assert self.steps is not None
        return [
            "--speculative-num-steps", str(self.steps), "--speculative-eagle-topk", str(self.topk),
            "--speculative-num-draft-tokens", str(self.draft_tokens or self.steps + 1),
        ]  # fmt: skip


class Grid(StrictModel):
    """A grid file. `together`: baseline and drafter are up at once and take turns."""

    python: str = ""
    model_path: str = ""
    together: bool = True
    start_s: float = Field(default=1800.0, gt=0)
    baseline: ServerSpec = ServerSpec()
    settings: tuple[Setting, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_differ(self) -> Grid:
        twice = sorted(n for n, k in Counter(s.name for s in self.settings).items() if k > 1)
        if twice:
            raise ValueError(f"settings named twice: {', '.join(twice)}")
        if any(s.name == BASELINE for s in self.settings):  # logs and spools go by the name
            raise ValueError(
                "'baseline' is the server without a drafter: name the setting otherwise"
            )
        return self


def load_grid(text: str) -> Grid:
    """A grid file by its path, or chains by their steps, as `1,2,3`. Raises ConfigError."""
    parts = [p.strip() for p in text.split(",")]
    if all(p.isdigit() for p in parts):
        chains = [{"name": f"K{p}", "steps": int(p)} for p in parts]
        return parse({"settings": chains}, Grid, where=f"grid {text}")
    path = Path(text)
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"'{text}' is no grid", fix="give a .yaml file, or draft steps as 1,2,3")
    return load_yaml(path, Grid)
