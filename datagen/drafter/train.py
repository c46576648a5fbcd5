"""The training loop: step 0 is measured before anything is trained; then steps, checkpoints, metrics.

Everything that happens at step n is a function of the settings, the data and n: a run that was killed
and goes on from its newest checkpoint ends, on a CPU, with the weights of one that was not, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datagen.drafter.checkpoint import MAPS, export_files, write_directory
from datagen.drafter.clock import Clock
from datagen.drafter.curves import read_metrics, write_curves
from datagen.drafter.dataset import SampleRef, StatesSource
from datagen.drafter.gradients import Eager, Gradients, Recorded, may_be_recorded, recorded_shapes
from datagen.drafter.heldout import HeldOut
from datagen.drafter.loader import Loader, idle_copy
from datagen.drafter.logs import MetricsLog
from datagen.drafter.model import Drafter
from datagen.drafter.optimise import (
    Average,
    learning_rate,
    moments,
    optimizers,
    restore_moments,
)
from datagen.drafter.packing import Order, Step, Usable, usable
from datagen.drafter.ranks import Ranks
from datagen.drafter.rows import Batch
from datagen.drafter.sanity import require_better_than_chance, require_same_target
from datagen.drafter.settings import RunConfig, TrainConfig
from datagen.drafter.state import (
    PROVENANCE,
    RunDirectory,
    read_provenance,
    require_same_settings,
)
from datagen.drafter.step import StepLoss, Sums, bad_samples, depth_weights, row_loss
from datagen.drafter.target import Target
from datagen.drafter.vocab import DraftVocab
from datagen.errors import Interrupted, TrainingFailed
from datagen.store.atomic import write_json_atomic

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Material:
    """What is trained, on what. `warm`: the drafter comes from a checkpoint."""

    drafter: Drafter
    vocab: DraftVocab
    target: Target
    warm: bool
    sources: Sequence[StatesSource]
    weights: Sequence[float]
    train: Sequence[SampleRef]
    heldout: Sequence[SampleRef]
    provenance: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Acceptance before and after; where the drafter lies."""

    before: dict[str, Any]
    after: dict[str, Any]
    steps: int
    final: Path


class Trainer:
    """One run. `run()` trains to the end, from the newest checkpoint if there is one."""

    def __init__(
        self, material: Material, config: TrainConfig, how: RunConfig, directory: RunDirectory,
        ranks: Ranks, notify: Notify, stop: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._m, self._config, self._how = material, config, how
        self._directory, self._ranks, self._notify, self._stop = directory, ranks, notify, stop
        self._device = ranks.device
        cuda = self._device.type == "cuda"
        wanted = ("bfloat16" if cuda else "float32") if how.dtype == "auto" else how.dtype
        self._dtype = torch.bfloat16 if wanted == "bfloat16" else torch.float32
        self._drafter = material.drafter.to(self._device)
        self._drafter.recompute = how.recompute
        self._drafter.casts.fuse = how.compile and cuda
        self._target = material.target.to(self._device, self._dtype)
        self._final_norm = material.sources[0].info.final_norm
        self._train = usable(material.train, config.longest)
        self._heldout = usable(material.heldout, config.longest)
        self._order = Order(
            self._train, seed=config.seed, batch_tokens=config.batch_tokens,
            accumulate=config.accumulate, ranks=ranks.count, depths=config.depths,
            weights=material.weights,
        )  # fmt: skip
        self.total_steps = self._order.total_steps(config.epochs)
        if config.max_steps:
            self.total_steps = config.max_steps
        graphed = may_be_recorded(self._drafter, how, ranks)
        module = StepLoss(
            self._drafter, self._target, material.vocab, config, final_norm=self._final_norm,
            attention=how.attention, compiled=how.compile and cuda, fixed=graphed,
        )  # fmt: skip
        self._gradients: Gradients = (
            Recorded(module, self._dtype, keeps=config.accumulate > 1)
            if graphed
            else Eager(ranks.wrapped(module), self._dtype, ranks)
        )
        self._optimizer = optimizers(self._drafter, config, self._device)
        self._average = Average(self._drafter, config.ema) if config.ema else None
        pad = recorded_shapes(config.batch_tokens) if graphed else None
        self._loader = self._loader_of(self._train, pad)
        self._held = HeldOut(
            drafter=self._drafter, average=self._average, target=self._target,
            loader=self._loader_of(self._heldout), batch_tokens=config.batch_tokens,
            depths=config.depths, attention=how.attention, final_norm=self._final_norm,
            device=self._device, dtype=self._dtype, total_steps=self.total_steps, notify=notify,
        )  # fmt: skip

    # -- the run -------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Train to the end. Raises TrainingFailed, Interrupted, FingerprintMismatch, CorruptFile."""
        finished = self._finished()
        if finished is not None:
            return finished
        done = self._resume()
        self._say_what_is_used()
        log = MetricsLog(self._directory, self._notify) if self._ranks.rank == 0 else None
        try:
            before = self._measure_start(done, log)
            self._steps(done, log)
            if self.total_steps not in self._held.measured:
                self._held.at(self.total_steps, log)
            last = self._held.measured[self.total_steps]
        finally:
            if log is not None:
                log.close()
        if self._ranks.rank == 0:
            write_curves(self._directory.curves, read_metrics(self._directory.metrics))
            write_directory(self._directory.final, lambda d: self._export(d, before, last))
        self._ranks.wait()
        return Outcome(before, last, self.total_steps, self._directory.final)

    def _steps(self, done: int, log: MetricsLog | None) -> None:
        plan = [self._order.step(n) for n in range(done, self.total_steps)]
        mine = (numbers for step in plan for numbers in self._own_batches(step))
        stream = self._loader.stream(mine)
        clock = Clock(self._loader)
        nothing = [[0.0] * self._config.depths for _ in range(3)]
        since_3K = nothing
        for step in plan:
            rate, norm, table_3K = self._one_step(step, stream)
            since_3K = [
                [a + b for a, b in zip(*rows, strict=True)]
                for rows in zip(since_3K, table_3K, strict=True)
            ]
            finished = step.number + 1
            clock.count(step)
            if finished % self._how.log_every == 0 or finished == self.total_steps:
                self._log_step(log, finished, step, rate, norm, since_3K, clock)
                since_3K = nothing
            if finished % self._how.evaluate_every == 0 or finished == self.total_steps:
                with clock.paused():
                    self._held.at(finished, log)
            stopping = self._stop()
            if finished % self._how.checkpoint_every == 0 or stopping:
                with clock.paused():
                    self._save(finished)
            if stopping and finished < self.total_steps:
                raise Interrupted(
                    f"stopped after step {finished} of {self.total_steps}; the checkpoint is written",
                    where=self._directory.root, fix="run the same command again to go on",
                )  # fmt: skip

    def _own_batches(self, step: Step) -> list[tuple[int, ...]]:
        """This rank's micro-batches; one without any of its own reads the step's first, and idles."""
        own = step.batches[self._ranks.rank]
        return [numbers or step.batches[0][0] for numbers in own]

    def _one_step(
        self, step: Step, stream: Iterator[Batch]
    ) -> tuple[float, float, list[list[float]]]:
        """Learning rate, gradient norm, and Sums.table over all ranks."""
        config, ranks = self._config, self._ranks
        rate = learning_rate(step.number, self.total_steps, config)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        weight_K = depth_weights(config, step.rows, step.tokens, self._device) * ranks.count
        own = step.batches[ranks.rank]
        self._optimizer.zero_grad()
        seen: list[tuple[Batch, Sums]] = []
        loss = torch.zeros((), device=self._device)
        table_3K = torch.zeros(3, config.depths, device=self._device)
        for i, numbers in enumerate(own):
            batch = next(stream)
            batch = batch if numbers else idle_copy(batch)
            total, sums = self._gradients(batch, weight_K, last=i == len(own) - 1)
            loss += total
            table_3K += sums.table_3K
            seen.append((batch, sums))
        norm = torch.nn.utils.clip_grad_norm_(self._drafter.parameters(), config.clip)
        # One exchange and one wait for the GPU a step, before the weights are touched.
        counted = ranks.summed(torch.cat([torch.stack([loss, norm.float()]), table_3K.flatten()]))
        loss_sum, norm_sum, *flat = counted.tolist()
        if not (math.isfinite(loss_sum) and math.isfinite(norm_sum)):
            self._fail(step, seen)
        self._optimizer.step()
        if self._average is not None:
            self._average.update(self._drafter, step.number)
        table = [flat[i : i + config.depths] for i in range(0, len(flat), config.depths)]
        return rate, norm_sum / ranks.count, table

    def _fail(self, step: Step, seen: list[tuple[Batch, Sums]]) -> None:
        named = [s for batch, sums in seen for s in bad_samples(batch, sums.bad_A)]
        what = ", ".join(named[:8]) or "none by itself: the gradient overflowed"
        more = f" and {len(named) - 8} more" if len(named) > 8 else ""
        raise TrainingFailed(
            f"step {step.number + 1}: the loss or its gradient is no number; samples: {what}{more}",
            where=self._directory.root,
            fix="check these samples with `datagen verify`, or lower the learning rate",
        )

    # -- measuring -----------------------------------------------------------------------------

    def _measure_start(self, done: int, log: MetricsLog | None) -> dict[str, Any]:
        """Acceptance before any training, proven better than chance for a warm start."""
        if done:
            stored = log.first_measured() if log is not None else None
            return stored or {}
        if log is not None:
            self._directory.truncate_metrics(-1)
        result = self._held.at(0, log)
        if self._final_norm != "none":
            require_same_target(result, self._m.sources[0].info.target_model)
        if self._m.warm and not self._how.allow_chance:
            require_better_than_chance(result)
        return self._held.measured[0]

    def _log_step(
        self, log: MetricsLog | None, finished: int, step: Step, rate: float, norm: float,
        table_3K: list[list[float]], clock: Clock,
    ) -> None:  # fmt: skip
        """`table_3K`: summed over the steps since the last line."""
        speed = clock.speed()
        if log is None:
            return
        losses, pairs, hits = table_3K
        by_depth = [a / max(1.0, n) for a, n in zip(losses, pairs, strict=True)]
        loss = row_loss(by_depth, self._config.decay)
        log.train(
            finished,
            {
                "epoch": step.epoch, "loss": loss, "grad_norm": norm, "learning_rate": rate,
                "loss_by_depth": by_depth,
                "hit_share_by_depth": [h / max(1.0, n) for h, n in zip(hits, pairs, strict=True)],
                **speed,
            },
        )  # fmt: skip
        self._notify(
            f"step {finished} of {self.total_steps}: loss {loss:.4f}, "
            f"{speed['rows_per_s']:,.0f} supervised tokens/s, "
            f"{100 * speed['wait_share']:.1f} % of the time waiting for data"
        )

    # -- keeping -------------------------------------------------------------------------------

    def _finished(self) -> Outcome | None:
        """The outcome of a run that is complete; raises FingerprintMismatch when it is another's."""
        final = self._directory.final
        if not (final / PROVENANCE).exists():
            return None
        stored = read_provenance(final)
        require_same_settings(stored["settings"], self._m.provenance["settings"], final)
        self._notify(f"{final}: complete, nothing to do")
        return Outcome(stored["before"], stored["heldout"], stored["step"], final)

    def _resume(self) -> int:
        found = self._directory.latest(self._m.provenance["settings"])
        if found is None:
            return 0
        done, stored = found
        with torch.no_grad():
            for name, parameter in self._drafter.named_parameters():
                parameter.copy_(stored[f"master.{name}"])
        if self._average is not None:
            for name, kept in self._average.weights.items():
                kept.copy_(stored[f"average.{name}"])
        restore_moments(self._optimizer, self._drafter, stored)
        if self._ranks.rank == 0:
            self._directory.truncate_metrics(done)
        self._notify(f"going on after step {done} of {self.total_steps}")
        return done

    def _save(self, step: int) -> None:
        if self._ranks.rank == 0:
            tensors: dict[str, Tensor] = {
                f"master.{n}": p for n, p in self._drafter.named_parameters()
            }
            tensors |= moments(self._optimizer, self._drafter)
            if self._average is not None:
                tensors |= {f"average.{n}": t for n, t in self._average.weights.items()}
            self._directory.save(
                step, tensors, {**self._m.provenance, "step": step},
                lambda d: self._export_weights(d), keep=self._how.keep,
            )  # fmt: skip
        self._ranks.wait()

    def _export(self, directory: Path, before: dict[str, Any], after: dict[str, Any]) -> None:
        self._export_weights(directory)
        record = {**self._m.provenance, "step": self.total_steps, "before": before}
        write_json_atomic(directory / PROVENANCE, {**record, "heldout": after})

    def _export_weights(self, directory: Path) -> None:
        weights: dict[str, Tensor] = dict(self._drafter.state_dict())
        if self._average is not None:
            weights |= self._average.weights
        assert set(MAPS) < set(weights)
        export_files(
            directory, self._drafter.config, weights, target_type=self._target.model_type,
            context_length=self._target.context_length, dtype=self._how.export_dtype,
        )  # fmt: skip

    def _loader_of(self, data: Usable, pad: tuple[int, int] | None = None) -> Loader:
        return Loader(
            self._m.sources, data, self._config.depths, threads=self._how.threads, pad=pad,
            processes=pad is not None,
            ahead=self._how.ahead or 2 * self._how.threads, pin=self._device.type == "cuda",
        )  # fmt: skip

    def _say_what_is_used(self) -> None:
        for name, data in (("train", self._train), ("held-out", self._heldout)):
            self._notify(
                f"{name}: {len(data.refs):,} samples, {sum(data.lengths):,} tokens; "
                f"{data.clipped} cut at {self._config.longest} tokens, "
                f"{data.no_row} left out without a trained row"
            )
        if not self._heldout.refs:
            raise TrainingFailed("no held-out sample has a trained row", fix="hold out longer ones")
