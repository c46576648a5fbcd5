"""The evaluate job without Prefect: a manifest and a drafter in, accept_len and a verdict out.

evaluation/<name>.json beside the manifest holds every figure with its conditions; `datagen report` reads
it. Replay needs no target; a live sitting needs two servers of it, one with the drafter.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datagen.acceptance.breakeven import break_even, within_chain
from datagen.acceptance.live import SPECULATIVE, LivePrompt
from datagen.acceptance.metrics import (
    Counts,
    Interval,
    accept_len,
    compare,
    conditional_acceptance,
    looping_share,
    predicted_accept_len,
    slices,
)
from datagen.acceptance.sitting import Sitting
from datagen.acceptance.stopping import Stop, never, require_going, run_until
from datagen.acceptance.verdict import judged
from datagen.errors import MeasurementError
from datagen.evaluate.config import EvaluateConfig
from datagen.evaluate.grid import break_evens, measured_grid, servers
from datagen.evaluate.subject import (
    Notify,
    digest_of,
    embedded_weights,
    require_not_trained_on,
    tags_of,
    trained,
)
from datagen.store.atomic import make_directory, write_json_atomic
from datagen.store.manifest import Manifest
from datagen.target.profile import Profile, load_profile

if TYPE_CHECKING:
    from datagen.acceptance.live import LiveReport, Speed
    from datagen.acceptance.replay import Replay
    from datagen.drafter.dataset import ManifestSource
    from datagen.drafter.rows import Sample
    from datagen.drafter.target import Target

FORMAT = "datagen.evaluation.1"


def evaluate(config: EvaluateConfig, notify: Notify, stop: Stop = never) -> dict[str, Any]:
    """Measure, judge, and write evaluation/<name>.json; returns its content. Raises DatagenError.

    `stop`: once it says so, the servers that were started end, and Interrupted is raised.
    """
    job = _Job(config, notify, stop)
    result = job.run()
    path = config.manifest.parent / "evaluation" / f"{config.name}.json"
    make_directory(path.parent)
    write_json_atomic(path, result)
    notify(f"written: {path}")
    return result


class _Job:
    """What one evaluation reads once."""

    def __init__(self, config: EvaluateConfig, notify: Notify, stop: Stop) -> None:
        from datagen.drafter.dataset import ManifestSource, first_by_hash, require_disjoint

        self.config, self.notify, self.stop = config, notify, stop
        self.source: ManifestSource = ManifestSource(config.manifest)
        self.manifest = Manifest.load(config.manifest)
        refs = self.source.index(config.split, 0)
        usable = [r for r in refs if r.n_tokens - r.n_context > 1]
        if not usable:
            raise MeasurementError(
                f"the split '{config.split}' holds no response of two tokens ({len(refs)} samples)",
                where=config.manifest,
                fix="collect held-out prompts: a mix with a heldout section",
            )
        self.refs = first_by_hash(usable, config.limit) if config.limit else usable
        if config.split != "train":
            require_disjoint(self.source.index("train", 0), self.refs)
        self.proof = require_not_trained_on(config.drafter, self.refs)
        self.tags = tags_of(config.manifest.parent, self.refs)

    @property
    def profile(self) -> Profile:
        """Of the target that is asked live."""
        return load_profile(self.config.target or str(self.manifest.target["profile"]))

    def run(self) -> dict[str, Any]:
        config = self.config
        counts, drafter, seconds, expected = self._replayed(config.drafter)
        found = accept_len(counts)
        tokens = sum(c.tokens for c in counts)
        self.notify(f"replay: accept_len {found} ({tokens / seconds:,.0f} tokens/s)")
        conditional = conditional_acceptance(counts)
        report: dict[str, Any] = {
            "format": FORMAT,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "code_version": version("datagen"),
            "settings": config.model_dump(mode="json"),
            "manifest": {"path": str(config.manifest), "sha256": self.source.info.sha256},
            "drafter": drafter,
            "split": {
                "name": config.split, "samples": len(self.refs),
                "prompts": len({r.prompt_id for r in self.refs}),
                "prompts_sha256": digest_of(self.refs), "disjoint_from_training": self.proof,
                "sampling": self.manifest.sampling.get(config.split),
            },
            "replay": {
                "accept_len": asdict(found), "steps": config.steps,
                "verify_steps": sum(c.steps for c in counts), "tokens": tokens,
                "conditional_acceptance": conditional,
                "predicted_accept_len": predicted_accept_len(conditional),
                "looping_share": looping_share(counts),
                "mean_distinct_4": sum(c.distinct for c in counts) / len(counts),
                "slices": {
                    n: {v: asdict(i) for v, i in values.items()}
                    for n, values in slices(counts).items()
                },
                "expected": expected, "seconds": seconds, "dtype": config.dtype,
            },
        }  # fmt: skip
        if config.against is not None:
            other, about, *_ = self._replayed(config.against)
            comparison = compare(other, counts)
            report["comparison"] = {
                "against": about, "accept_len": asdict(accept_len(other)),
                **asdict(comparison), "text": str(comparison),
            }  # fmt: skip
            self.notify(f"against {config.against}: {comparison}")
        speeds: tuple[Speed, ...] = ()
        if config.live:
            with servers(config, self.profile, self.stop) as (baseline_url, live_url):
                live = self._live(baseline_url, live_url)
                report["parity"] = self._parity(live, baseline_url)
            speeds = live.speeds
            report["live"] = live.as_dict()
        verdict = judged(
            found, steps=config.steps, baseline=config.baseline, cycle_ms=config.cycle_ms,
            measured=speeds[0] if speeds else None,
        )  # fmt: skip
        if speeds:
            by_batch = break_evens(speeds, config.steps, found.value, config.targets)
            report["break_even"], report["break_even_by_batch"] = by_batch[0], by_batch
        elif config.baseline and config.cycle_ms:
            report["break_even"] = break_even(
                baseline=config.baseline, cycle_ms=config.cycle_ms, steps=config.steps,
                targets=config.targets,
                measured=[(within_chain(found.value, config.steps), config.steps)],
            ).as_dict()  # fmt: skip
        if config.grid is not None:
            report["grid"] = self._grid(found)
            of_grid = report["grid"].pop("verdict")
            verdict = verdict if speeds else of_grid
        report["verdict"] = asdict(verdict)
        return report

    # -- live ----------------------------------------------------------------------------------

    def _sitting(self) -> Sitting:
        config, limit = self.config, int(self.manifest.settings["max_new_tokens"])
        prompts = []
        for ref in self.refs[: config.live_prompts]:
            ids, _ = self.source.ids(ref)
            context = tuple(int(i) for i in ids[: ref.n_context])
            prompts.append(
                LivePrompt(ref.sample_id, ref.prompt_id, context, limit, self.tags[ref.sample_id])
            )
        return Sitting(
            tuple(prompts), self.source.info.stop_token_ids, config.concurrencies, config.rounds
        )

    def _live(self, baseline_url: str, live_url: str) -> LiveReport:
        report = run_until(self.stop, self._sitting().both(baseline_url, live_url))
        served = report.servers[SPECULATIVE].get("speculative_num_steps")
        if served != self.config.steps:
            raise MeasurementError(
                f"the server drafts {served} tokens a cycle, replay {self.config.steps}",
                where=live_url,
                fix=f"give --steps {served}",
            )
        self.notify(f"live: accept_len {report.accept_len}, {report.speeds[0].speedup:.2f}x")
        return report

    def _parity(self, live: LiveReport, url: str) -> dict[str, Any]:
        """Replay of the speculative run's own outputs, captured afterwards, against its counts."""
        from datagen.acceptance.parity import captured_outputs

        found = run_until(self.stop, captured_outputs(url, live.outputs, self.profile))
        runner, *_ = self._runner(self.config.drafter)
        ours = [r.counts.steps for r in runner.run(s for s, _ in found)]
        theirs = [a.generation.spec_verify_ct or 0 for _, a in found]
        differ = {
            s.sample_id: {"replay": mine, "live": other}
            for (s, _), mine, other in zip(found, ours, theirs, strict=True)
            if mine != other
        }
        self.notify(
            f"parity: {sum(ours):,} verify steps replayed, {sum(theirs):,} live; "
            f"{len(differ)} of {len(found)} samples differ"
        )
        return {
            "samples": len(found), "replay_steps": sum(ours), "live_steps": sum(theirs),
            "differ": differ,
        }  # fmt: skip

    def _grid(self, found: Interval) -> dict[str, Any]:
        """Every setting of the grid, replayed too where it drafts a chain of another length."""

        def replayed(steps: int) -> Interval:
            if steps == self.config.steps:
                return found
            runner, *_ = self._runner(self.config.drafter, steps)
            return accept_len([r.counts for r in runner.run(self._samples(), self.tags)])

        return measured_grid(
            self.config, self.profile, self._sitting(), replayed, self.notify, self.stop
        )

    # -- replay --------------------------------------------------------------------------------

    def _replayed(
        self, directory: Path
    ) -> tuple[list[Counts], dict[str, Any], float, dict[str, float | int] | None]:
        """Counts, what the drafter is, the replay's seconds without its loading, and for sampled

        responses what the steps were expected to deliver.
        """
        from datagen.acceptance.expected import Draw, expected_of_sample, mean_and_spread

        runner, target, about = self._runner(directory)
        how = self.manifest.sampling.get(self.config.split) or {}
        draw = None
        if how.get("temperature", 0) > 0 and self.source.info.final_norm != "none":
            draw = Draw(
                target.head_on(runner.device), runner.device, self.source.info.final_norm, how["temperature"],
                how.get("top_p", 1.0), how.get("top_k", -1),
            )  # fmt: skip
        counts, expected = [], []
        started = time.monotonic()
        for found in runner.run(self._samples(), self.tags):
            counts.append(found.counts)
            if draw is not None and (one := expected_of_sample(found, draw)) is not None:
                expected.append((found.counts.prompt_id, one))
        return counts, about, time.monotonic() - started, mean_and_spread(expected)

    def _samples(self) -> Iterator[Sample]:
        for ref in self.refs:
            require_going(self.stop)
            yield self.source.read(ref, ref.n_tokens)

    def _runner(self, directory: Path, steps: int = 0) -> tuple[Replay, Target, dict[str, Any]]:
        """A replay at K = `steps` (0: the evaluation's own), the target, and what the drafter is."""
        from datagen.acceptance.replay import Replay, compute_dtype, find_device
        from datagen.drafter.checkpoint import load_drafter
        from datagen.drafter.target import load_target

        config, info = self.config, self.source.info
        target = load_target(
            config.target_weights or embedded_weights(info.target_model, self.notify)
        )
        loaded = load_drafter(directory, target_type=target.model_type)
        c = loaded.drafter.config
        for what, ours, theirs in (
            ("hidden size", c.hidden_size, info.hidden_size),
            ("vocabulary", c.vocab_size, target.vocab_size),
            ("width", c.width, len(info.boundaries) * info.hidden_size),
            ("boundaries", c.boundaries or info.boundaries, info.boundaries),
        ):
            if ours != theirs:
                raise MeasurementError(
                    f"the drafter's {what} is {ours}, that of the states {theirs}",
                    where=directory,
                    fix="evaluate a drafter of this target on states of its boundaries",
                )
        device = find_device(config.device)
        runner = Replay(
            loaded.drafter, target.embed_VH, steps=steps or config.steps, device=device,
            dtype=compute_dtype(config.dtype),
        )  # fmt: skip
        about = {"path": str(directory), "sha256": loaded.sha256, **trained(directory)}
        return runner, target, about
