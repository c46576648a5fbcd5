"""The settings of a training run, validated on construction."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from datagen.strict import StrictModel

LossKind = Literal["kl", "lk", "ce"]
OptimizerKind = Literal["adamw", "muon"]


class TrainConfig(StrictModel):
    """What decides the weights that come out. All of it is in the checkpoint's provenance."""

    depths: int = Field(default=5, ge=1, le=16)
    """Training-time-test length: at least the largest number of drafts that will be served."""
    loss: LossKind = "kl"
    decay: float = Field(default=0.8, gt=0, le=1)
    """Weight of depth k is decay^k."""
    normalise: Literal["positions", "masked"] = "positions"
    """positions: by all tokens of the step, as EAGLE and SpecForge; masked: by trained rows of each
    depth, as speculators."""
    drop_outside: bool = True
    """Leave out rows whose target choice no draft token can be."""
    optimizer: OptimizerKind = "adamw"
    """muon: orthogonalised momentum for the matrices but lm_head, scaled so that the root mean square of an
    orthogonal step is 0.2 of the learning rate; AdamW for the rest."""
    learning_rate: float = Field(default=1e-4, gt=0)
    warmup: float = Field(default=0.02, ge=0, lt=1)
    """Share of the steps. Longer ones (0.1, 0.2) and another rate change neither how the loss of small
    data wanders (by what a batch holds) nor help acceptance."""
    floor: float = Field(default=0.0, ge=0, le=1)
    """Share of the learning rate left at the end of the cosine."""
    weight_decay: float = Field(default=0.0, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    clip: float = Field(default=0.5, gt=0)
    """Largest norm of the gradient."""
    ema: float = Field(default=0.0, ge=0, lt=1)
    """Decay of the averaged weights that are then measured and exported; 0 is off."""
    epochs: int = Field(default=1, ge=1)
    max_steps: int = Field(default=0, ge=0)
    """0: as many as the epochs have."""
    batch_tokens: int = Field(default=4096, ge=8)
    max_tokens: int = Field(default=0, ge=0)
    """Samples are cut there; 0: at batch_tokens."""
    accumulate: int = Field(default=1, ge=1)
    limit: int = Field(default=0, ge=0)
    """Samples to train on, a nested subset; 0: all."""
    seed: int = Field(default=0, ge=0)
    heldout: int = Field(default=64, ge=1)
    """Samples of the held-out slice."""

    @model_validator(mode="after")
    def _longest_fits(self) -> TrainConfig:
        if self.max_tokens > self.batch_tokens:
            raise ValueError("max_tokens exceeds batch_tokens: the longest sample fits no batch")
        return self

    @property
    def longest(self) -> int:
        """Tokens at which a sample is cut."""
        return self.max_tokens or self.batch_tokens


class RunConfig(StrictModel):
    """How it is run: changes speed and what is kept, and no more than float noise of the weights."""

    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of activations; auto: bfloat16 on CUDA. Weights and their moments are float32."""
    attention: Literal["auto", "eager", "flex"] = "auto"
    compile: bool = True
    """Fuse the loss on CUDA."""
    graphs: bool = True
    """Record a small drafter's kernels once and replay them (one CUDA device): see gradients.py."""
    recompute: bool = False
    """Recompute deeper steps in the backward pass: less memory, more time."""
    threads: int = Field(default=4, ge=1)
    """That decode shards, per rank. At Kimi's size a batch of 8,192 tokens is 0.5 GB. Where a step is
    recorded they are processes."""
    ahead: int = Field(default=0, ge=0)
    """Batches prepared in advance; 0: twice the threads."""
    checkpoint_every: int = Field(default=200, ge=1)
    evaluate_every: int = Field(default=200, ge=1)
    log_every: int = Field(default=10, ge=1)
    keep: int = Field(default=2, ge=1)
    """Checkpoints kept; the final one besides."""
    export_dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    allow_chance: bool = False
    """Train on from an init checkpoint that scores at chance."""
