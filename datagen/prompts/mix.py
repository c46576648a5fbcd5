"""Mix files: which prompts a run takes, from where, how many of each, and under which rules.

A mix is a YAML file (`prompts/mixes/*.yaml`). Unknown keys are errors. Paths are relative to the
mix file. Every key is described where it is declared below, and in prompts/README.md.
"""

from __future__ import annotations

import glob
import hashlib
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr, model_validator

from datagen.errors import MixError, PromptDataError
from datagen.strict import StrictModel, load_yaml

Adapter = Literal["auto", "openai", "openai-tools", "sharegpt", "prompt", "alpaca"]
SHIPPED = Path(__file__).resolve().parents[2] / "prompts" / "mixes"


class Limits(StrictModel):
    """Which prompts are too small or too large. Nothing is ever cut: what does not fit is dropped."""

    min_chars: int = Field(default=8, ge=0)
    """Fewest characters of all user messages together, surrounding space not counted."""
    max_turns: int = Field(default=16, ge=1)
    """Most user messages of a conversation."""
    min_prompt_tokens: int = Field(default=0, ge=0)
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Bounds on the rendered prompt, tools and template included, counted by the target's tokenizer."""
    leading_assistant: Literal["skip", "drop"] = "skip"
    """A conversation that begins with an answer: skip those answers, or drop the conversation."""


class Near(StrictModel):
    """Near duplicates: Jaccard similarity of the sets of word n-grams, found by MinHash LSH."""

    threshold: float = Field(default=0.82, gt=0.3, le=1)
    permutations: int = Field(default=64, ge=16, le=512)
    bands: int = Field(default=16, ge=1)
    shingle_words: int = Field(default=3, ge=1, le=16)
    min_words: int = Field(default=8, ge=1)
    """Shorter prompts are compared exactly only."""

    @model_validator(mode="after")
    def _bands_divide(self) -> Near:
        if self.permutations % self.bands:
            raise ValueError("bands must divide permutations")
        if self.min_words < self.shingle_words:
            raise ValueError("min_words must be at least shingle_words")
        return self


class Dedup(StrictModel):
    """Exact duplicates (same words after NFKC and casefold, same tools) always go; near ones if set."""

    near: Near | None = Near()


class Decontaminate(StrictModel):
    """Drops training prompts that contain held-out ones. The mix's own held-out set always counts."""

    against: tuple[str, ...] = ()
    """Held-out sets: names of files in `../heldout` without `.jsonl.zst`, or paths."""
    ngram_words: int = Field(default=13, ge=2, le=64)
    long_text_words: int = Field(default=1000, ge=1)
    """Below this length one shared n-gram is enough; above, `long_text_share` of them."""
    long_text_share: float = Field(default=0.02, gt=0, le=1)


class Thinking(StrictModel):
    """Thinking switched on for a share of the prompts, by the hash of the prompt; off for the rest.

    Applies to targets that have such a switch, and to no other.
    """

    on_share: float = Field(ge=0, le=1)


class CapBy(StrictModel):
    """At most `max_share` of a source's count may have the same value in `column`."""

    column: str
    max_share: float = Field(gt=0, le=1)


class Source(StrictModel):
    """One source: local files or a hub dataset, and how many prompts to take from it."""

    name: str = Field(min_length=1, max_length=64)
    file: str | tuple[str, ...] | None = None
    """.jsonl, .jsonl.zst, .parquet or .arrow; several, or a pattern with `*`, count as one."""
    dataset: str | None = None
    """A dataset of the Hugging Face hub, streamed; `subset`, `split` and `revision` belong to it."""
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    count: int = Field(ge=1)
    adapter: Adapter = "auto"
    columns: dict[str, str] = Field(default_factory=dict)
    """Where the rows keep things: messages, tools, prompt, instruction, input, system, language,
    category, license; a dot reaches into an object. What is not named has its usual name."""
    messages_json: bool = False
    """The messages column holds JSON text."""
    where: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Only rows whose column has one of these values."""
    cap_by: CapBy | None = None
    limits: Limits | None = None
    """Instead of the mix's defaults."""
    licence: str = Field(min_length=1)
    """SPDX id, or `per-row` when every row names its own."""
    category: str | None = None
    language: str | None = None
    gated: bool = False
    near_dedup: bool = True
    """False for several questions about one long text: near, but no duplicates."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Lower limit on the length of the answers to this source's prompts."""
    note: str | None = None

    @model_validator(mode="after")
    def _one_origin(self) -> Source:
        if (self.file is None) == (self.dataset is None):
            raise ValueError(f"source '{self.name}' needs either file or dataset")
        return self


class Heldout(StrictModel):
    """Prompts that are never trained on: whole sets, a share of the training prompts, or both."""

    sources: tuple[Source, ...] = ()
    hash_share: float = Field(default=0.0, ge=0, lt=1)
    """This share of the training prompts, chosen by hash, is held out as well."""
    limit_share: float = Field(default=0.1, ge=0, lt=1)
    """Of a run limited to n prompts, at least this share is held-out, as far as there are so many."""


class Mix(StrictModel):
    """A mix file. The counts of all sources, held-out ones included, add up to `total`."""

    version: Literal[1]
    description: str = ""
    total: int = Field(ge=1)
    seed: int = Field(default=0, ge=0)
    on_short_source: Literal["fail", "rescale"] = "fail"
    """A source with fewer usable prompts than its count: an error, or made up for by the others."""
    defaults: Limits = Limits()
    dedup: Dedup = Dedup()
    decontaminate: Decontaminate = Decontaminate()
    thinking: Thinking | None = None
    sources: tuple[Source, ...] = Field(min_length=1)
    heldout: Heldout = Heldout()

    _path: Path = PrivateAttr(default=Path("mix.yaml"))

    @model_validator(mode="after")
    def _adds_up(self) -> Mix:
        names = [s.name for s in self.all_sources]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(f"source names must differ: {', '.join(twice)} occur twice")
        counted = sum(s.count for s in self.all_sources)
        if counted != self.total:
            raise ValueError(
                f"the counts of the sources add up to {counted:,}, but total is {self.total:,}"
            )
        return self

    @property
    def all_sources(self) -> tuple[Source, ...]:
        """Held-out sources first: a prompt that is in both is theirs."""
        return (*self.heldout.sources, *self.sources)

    @property
    def name(self) -> str:
        """The file's name without its extension."""
        return self._path.stem

    @property
    def path(self) -> Path:
        """Where the mix was read."""
        return self._path

    def limits_of(self, source: Source) -> Limits:
        """The limits that hold for a source."""
        return source.limits or self.defaults

    def files_of(self, source: Source) -> list[Path]:
        """The data files of a local source. Raises PromptDataError when one is missing."""
        patterns = (source.file,) if isinstance(source.file, str) else source.file or ()
        return [path for pattern in patterns for path in self._found(pattern)]

    def heldout_sets(self) -> dict[str, Path]:
        """The files to decontaminate against, by name. Raises PromptDataError when one is missing."""
        found: dict[str, Path] = {}
        for name in self.decontaminate.against:
            path = Path(name)
            if path.name == name and not name.endswith((".jsonl", ".zst", ".parquet", ".arrow")):
                path = Path("../heldout") / f"{name}.jsonl.zst"
            for file in self._found(str(path)):
                found[file.name.split(".")[0]] = file
        return found

    def _found(self, pattern: str) -> list[Path]:
        base = self._path.parent
        if any(c in pattern for c in "*?["):
            paths = [Path(p) for p in sorted(glob.glob(str(base / pattern), recursive=True))]
        else:
            try:
                paths = [base / pattern] if (base / pattern).exists() else []
            except OSError as e:
                raise PromptDataError(
                    f"the data file cannot be read: {e.strerror}",
                    where=base / pattern,
                    fix="check the permissions of its directory",
                ) from e
        if not paths:
            raise PromptDataError(
                f"mix '{self.name}' names a data file that does not exist",
                where=base / pattern,
                fix=f"put it there, or correct the path in {self._path}",
            )
        return paths


def mix_names() -> list[str]:
    """Names that `load_mix` knows: of ./prompts/mixes and of the shipped mixes."""
    return sorted({p.stem for folder in _folders() for p in folder.glob("*.yaml")})


def load_mix(name_or_path: str) -> Mix:
    """A mix by name or by the path of its YAML file. Raises MixError in one clear line."""
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        candidates = [folder / f"{name_or_path}.yaml" for folder in _folders()]
        found = next((c for c in candidates if c.is_file()), None)
        if found is None:
            raise MixError(
                f"unknown mix '{name_or_path}'",
                fix=f"use one of {', '.join(mix_names()) or '(none found)'}, "
                "or the path of a mix .yaml",
            )
        path = found
    mix = load_yaml(path, Mix, MixError)
    mix._path = path
    return mix


def mix_digest(mix: Mix) -> dict[str, Any]:
    """What a run's fingerprint holds of its prompts: the mix's content, and every file's sha256.

    File names are no part of it, file contents are. Raises PromptDataError.
    """
    content = mix.model_dump(mode="json", exclude={"description"})
    for source, plain in zip(
        mix.all_sources, [*content["heldout"]["sources"], *content["sources"]], strict=True
    ):
        plain.pop("note")
        if source.file is not None:
            plain["file"] = sorted(file_sha256(path) for path in mix.files_of(source))
    content["decontaminate"]["against"] = sorted(
        file_sha256(path) for path in mix.heldout_sets().values()
    )
    return {"name": mix.name, **content}


def file_sha256(path: Path) -> str:
    """sha256 of a file, as hex. Raises PromptDataError."""
    try:
        with path.open("rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()
    except OSError as e:
        raise PromptDataError(
            f"the data file cannot be read: {e.strerror}", where=path, fix="check its permissions"
        ) from e


def _folders() -> list[Path]:
    return [Path("prompts/mixes"), SHIPPED]
