"""The fine-tune job without Prefect: manifests in, a drafter that SGLang loads out. Resumes itself."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from datagen.drafter.settings import RunConfig, TrainConfig
from datagen.errors import ConfigError
from datagen.store.atomic import make_directory
from datagen.store.lock import RunLock
from datagen.strict import StrictModel, parse

if TYPE_CHECKING:
    from datagen.drafter.target import Target
    from datagen.drafter.train import Outcome
    from datagen.drafter.vocab import DraftVocab

Notify = Callable[[str], None]
DEFAULT_DRAFT_VOCAB = 32_000


class FinetuneConfig(StrictModel):
    """Everything that `datagen finetune` needs."""

    manifests: tuple[Path, ...] = Field(min_length=1)
    weights: tuple[float, ...]
    heldout_manifest: Path | None = None
    """Where the held-out slice comes from; None: the held-out splits of `manifests`."""
    out: Path
    init: Path | None = None
    """A drafter's checkpoint; None: a fresh one."""
    target_weights: Path | None = None
    """The target's checkpoint directory; None: the embedded one."""
    fresh_vocab: bool = False
    draft_vocab: int = Field(default=0, ge=0)
    train: TrainConfig = TrainConfig()
    how: RunConfig = RunConfig()


def finetune_config(
    *,
    manifest: str = "runs/demo/manifest.json",
    out: str = "",
    init: str = "",
    target_weights: str = "",
    heldout_manifest: str = "",
    weights: str = "",
    fresh_vocab: bool = False,
    draft_vocab: int = 0,
    **settings: Any,
) -> FinetuneConfig:
    """From flat scalars. `manifest`, `weights`: several with commas. Others: TrainConfig, RunConfig.

    `out`: empty is drafter/finetuned beside the first manifest. Raises ConfigError.
    """
    paths = [Path(p.strip()) for p in manifest.split(",") if p.strip()]
    if not paths:
        raise ConfigError("no manifest", fix="name the manifest.json of a finished run")
    paths = [p / "manifest.json" if p.is_dir() else p for p in paths]
    try:
        shares = [float(w) for w in weights.split(",")] if weights else [1.0] * len(paths)
    except ValueError as e:
        raise ConfigError(f"weights '{weights}': {e}", fix="write numbers with commas") from e
    if len(shares) != len(paths) or min(shares) < 0:
        raise ConfigError(f"{len(shares)} weights for {len(paths)} manifests, none below 0")
    train = {k: v for k, v in settings.items() if k in TrainConfig.model_fields}
    how = {k: v for k, v in settings.items() if k in RunConfig.model_fields}
    unknown = sorted(set(settings) - set(train) - set(how))
    if unknown:
        raise ConfigError(f"unknown settings {', '.join(unknown)}")
    return parse(
        {
            "manifests": paths,
            "weights": shares,
            "heldout_manifest": heldout_manifest or None,
            "out": out or paths[0].parent / "drafter" / "finetuned",
            "init": init or None,
            "target_weights": target_weights or None,
            "fresh_vocab": fresh_vocab,
            "draft_vocab": draft_vocab,
            "train": train,
            "how": how,
        },
        FinetuneConfig,
        where="finetune settings",
    )


def finetune(
    config: FinetuneConfig, notify: Notify, stop: Callable[[], bool] = lambda: False
) -> Outcome:
    """Fine-tune to the end, or on from the newest checkpoint. Raises DatagenError."""
    from datagen.drafter.ranks import find_ranks
    from datagen.drafter.state import RunDirectory, require_empty_of_others
    from datagen.drafter.train import Trainer

    require_empty_of_others(config.out)
    ranks = find_ranks(config.how.device)
    say: Notify = notify if ranks.rank == 0 else lambda _: None
    make_directory(config.out)
    if ranks.rank == 0:
        with RunLock(config.out / ".lock"):
            material = _material(config, say, ranks.count)
            trainer = Trainer(
                material, config.train, config.how, RunDirectory(config.out), ranks, say, stop
            )
            return trainer.run()
    material = _material(config, say, ranks.count)
    run = RunDirectory(config.out)
    return Trainer(material, config.train, config.how, run, ranks, say, stop).run()


def _material(config: FinetuneConfig, notify: Notify, ranks: int) -> Any:
    from datagen.drafter.coverage import coverage, coverage_line
    from datagen.drafter.dataset import first_by_hash, open_sources, require_disjoint
    from datagen.drafter.model import Drafter
    from datagen.drafter.start import (
        fresh_drafter,
        load_init,
        require_final_states,
        require_heldout,
        require_width,
    )
    from datagen.drafter.target import load_target
    from datagen.drafter.train import Material

    started = time.monotonic()
    train_sources = open_sources(config.manifests)
    info = train_sources[0].info
    extra = [] if config.heldout_manifest is None else [config.heldout_manifest]
    sources = open_sources([*config.manifests, *extra])
    target = load_target(config.target_weights or _embedded(info.target_model, notify))
    require_width(info, target)
    require_final_states(info, config.train.loss)
    train = [r for i, s in enumerate(train_sources) for r in s.index("train", i)]
    held_from = range(len(train_sources), len(sources)) if extra else range(len(train_sources))
    heldout = [r for i in held_from for r in sources[i].index("heldout", i)]
    require_heldout(heldout, extra[0] if extra else config.manifests[0])
    require_disjoint(train, heldout)
    train = first_by_hash(train, config.train.limit)
    heldout = first_by_hash(heldout, config.train.heldout)
    drafter: Drafter
    vocab: DraftVocab
    init: dict[str, Any] = {"kind": "fresh"}
    if config.init is None:
        vocab = _fresh_vocab(config, train_sources, target)
        drafter = fresh_drafter(info, target, vocab, config.train.seed)
    else:
        if config.fresh_vocab:
            raise ConfigError(
                "a new vocabulary map would re-point every row of the init drafter's lm_head",
                where=config.init, fix="leave out --fresh-vocab, or --init",
            )  # fmt: skip
        loaded = load_init(config.init, info, target)
        drafter, vocab = loaded.drafter, loaded.vocab
        init = {"kind": "checkpoint", "path": str(config.init), "sha256": loaded.sha256}
    notify(
        f"{len(train):,} samples to train on, {len(heldout):,} held out, draft vocabulary "
        f"{len(vocab.target_ids_U):,} of {vocab.vocab_size:,} "
        f"(read in {time.monotonic() - started:.1f} s)"
    )
    covered = coverage(sources, train, vocab)
    notify(coverage_line(covered))
    settings = {
        **config.train.model_dump(mode="json"),
        "manifests": [s.info.sha256 for s in sources],
        "weights": list(config.weights),
        "init": init.get("sha256", "fresh"),
        "vocab": vocab.digest,
        "dtype": config.how.dtype,
        "ranks": ranks,
    }
    provenance = {
        "settings": settings,
        "how": config.how.model_dump(mode="json"),
        "manifests": [{"path": s.info.path, "sha256": s.info.sha256} for s in sources],
        "init": init,
        "vocab_sha256": vocab.digest,
        "vocab_coverage": covered,
        "target": {"model": info.target_model, "revision": info.target_revision},
        "boundaries": list(info.boundaries),
        "samples": {"train": len(train), "heldout": len(heldout)},
        "versions": {
            "datagen": version("datagen"), "torch": version("torch"),
            "python": sys.version.split()[0],
        },
    }  # fmt: skip
    return Material(
        drafter=drafter, vocab=vocab, target=target, warm=config.init is not None,
        sources=sources, weights=config.weights, train=train, heldout=heldout,
        provenance=provenance,
    )  # fmt: skip


def _fresh_vocab(config: FinetuneConfig, sources: Any, target: Target) -> DraftVocab:
    from collections import Counter

    from datagen.drafter.vocab import by_frequency

    counted: Counter[int] = Counter()
    for source in sources:
        counted.update(source.info.token_frequencies)
    size = config.draft_vocab or min(DEFAULT_DRAFT_VOCAB, target.vocab_size)
    return by_frequency(counted, size, target.vocab_size, sources[0].info.stop_token_ids)


def _embedded(model: str, notify: Notify) -> Path:
    from datagen.embedded.weights import MODEL_NAME, ensure_checkpoint

    if model.rsplit("/", 1)[-1] != MODEL_NAME:
        raise ConfigError(
            f"the weights of {model} are not known here",
            fix="give --target-weights: its checkpoint directory (embedding and lm_head are read)",
        )
    return ensure_checkpoint(progress=notify)
