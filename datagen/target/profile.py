"""Target profiles: what a model is, independent of where it is served."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from datagen.errors import ProfileError
from datagen.strict import StrictModel, load_yaml

WIDE_BYTES = 16 << 10  # of a token: between SmolLM2 with 4.6 KB and Kimi with 57 KB


class Sampling(StrictModel):
    """Sampling parameters of one split, in SGLang's names."""

    temperature: float = Field(ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)


class SplitSampling(StrictModel):
    """Train rows follow the served distribution; held-out rows are greedy, so that they repeat."""

    train: Sampling
    heldout: Sampling = Sampling(temperature=0.0)


class TensorNames(StrictModel):
    """Where the checkpoint keeps what a drafter shares with its target."""

    embed_tokens: str = "model.embed_tokens.weight"
    lm_head: str = "lm_head.weight"
    norm: str = "model.norm.weight"


class RoleLaunch(StrictModel):
    """What one role adds. Each argument line is split as a shell would."""

    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default_factory=dict)


class Launch(StrictModel):
    """How SGLang serves this model. `{draft}` in a line stands for the drafter's path."""

    gpus: int = Field(default=1, ge=0)
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default_factory=dict)
    generate: RoleLaunch = RoleLaunch()
    capture: RoleLaunch = RoleLaunch()
    evaluate: RoleLaunch | None = None


class Profile(StrictModel):
    """A target model. `boundaries` are Hugging Face `hidden_states` indices: i = input of layer i."""

    name: str
    model: str
    licence: str
    aliases: tuple[str, ...] = ()
    embedded: bool = False
    hidden_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    context_length: int = Field(gt=0)
    boundaries: tuple[int, ...] = Field(min_length=1)
    final_norm: Literal["post", "pre"] = "post"
    capture_dtype: Literal["BF16", "F16", "F32"] = "BF16"
    stop_token_ids: tuple[int, ...] = Field(min_length=1)
    thinking_kwarg: str | None = None
    reasoning_end: str | None = None
    """Text that ends the reasoning of an answer; later turns get what follows it as the answer."""
    trust_remote_code: bool = False
    max_new_tokens: int = Field(gt=0)
    sampling: SplitSampling
    endpoint: str = "http://127.0.0.1:30000"
    tensors: TensorNames = TensorNames()
    init_drafters: tuple[str, ...] = ()
    """Published drafters of this target to start from, the best first."""
    launch: Launch = Launch()

    @model_validator(mode="after")
    def _boundaries_lie_inside(self) -> Profile:
        if list(self.boundaries) != sorted(set(self.boundaries)):
            raise ValueError("boundaries must increase strictly")
        if not 0 <= self.boundaries[0] <= self.boundaries[-1] < self.num_layers:
            raise ValueError(
                f"boundaries must lie in 0..{self.num_layers - 1}: boundary i enters decoder layer i"
            )
        return self

    @property
    def row_width(self) -> int:
        """Values per token in a capture: the boundaries, then the final state."""
        return (len(self.boundaries) + 1) * self.hidden_size

    @property
    def bytes_per_token(self) -> int:
        """Raw bytes of hidden states per token (57,344 for Kimi-K2.5)."""
        return self.row_width * (4 if self.capture_dtype == "F32" else 2)

    @property
    def wide(self) -> bool:
        """True where states are so large that moving them is the collector's work, and not the asking."""
        return self.bytes_per_token >= WIDE_BYTES

    def serves(self, *names: str) -> bool:
        """True when one of the names a server gives (path, served name) is this model."""
        known = {self.model.casefold(), *(a.casefold() for a in self.aliases)}
        known |= {k.rsplit("/", 1)[-1] for k in known}
        return any(n.rstrip("/").rsplit("/", 1)[-1].casefold() in known for n in names)


def profile_names() -> list[str]:
    """Names of the shipped profiles."""
    folder = resources.files("datagen") / "targets"
    return sorted(
        f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")
    )


def load_profile(name_or_path: str) -> Profile:
    """A shipped profile by name, or any profile by the path of its YAML file."""
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        if name_or_path not in profile_names():
            raise ProfileError(
                f"unknown target '{name_or_path}'",
                fix=f"use one of {', '.join(profile_names())}, or the path of a profile .yaml",
            )
        path = Path(str(resources.files("datagen") / "targets" / f"{name_or_path}.yaml"))
    return load_yaml(path, Profile, ProfileError)
