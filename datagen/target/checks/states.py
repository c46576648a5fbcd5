"""Checks of what the states are: the right layers, the right token, after the right norm.

Neighbouring layers differ by a cosine of 0.95 to 0.97 only, and a state of the token before looks as
healthy as the right one; so each is compared with its neighbours, and the nearest is named.
Shape suffixes: N positions, V vocabulary, H hidden, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from datagen.errors import CorruptFile
from datagen.target.checks.captured import cosines, rows_of_probe
from datagen.target.checks.probes import Answer, Evidence
from datagen.target.checks.reference import NoReference, normalised, streams
from datagen.target.checks.served import readable
from datagen.target.checks.subject import Subject
from datagen.target.checks.verdict import Finding, Skipped, ok, red
from datagen.target.weights import Checkpoint, Float, NoTensor

LEAST_COSINE = 0.998
MOST_ERROR = 0.2  # nats, mean over the likeliest tokens; bf16 logits near 20 are 0.125 apart
CLEAR_GAP = 0.125  # nats between the two likeliest tokens, above which no rounding swaps them
OFFSETS = (0, -1, 1)
MOST_TOKENS = 64


def check_boundaries(subject: Subject, found: Evidence) -> Finding:
    """Column i holds what decoder layer i reads: read back, then proven by values."""
    profile, attempt = subject.profile, found.captures.get("plain")
    if not subject.captures or attempt is None:
        raise Skipped("nothing was captured")
    wanted = profile.boundaries
    if attempt.note is not None:
        expected = f"boundaries {list(wanted)}"
        if attempt.note.width != profile.row_width:
            raise Skipped("the rows have another width: see `width`")
        if attempt.note.boundaries != wanted:
            return red(
                f"the engine captures boundaries {list(attempt.note.boundaries)}",
                expected,
                "set DATAGEN_CAPTURE_BOUNDARIES of the server to the profile's boundaries",
            )
    values = rows_of_probe(subject, found)
    proven = attempt.note is not None and attempt.note.self_test.startswith("passed")
    try:
        finding = _against_reference(subject, found, values)
    except (NoReference, NoTensor, CorruptFile) as e:
        if proven and attempt.note is not None:
            return ok(f"plugin's self-test: {attempt.note.self_test}", f"boundaries {list(wanted)}")
        said = attempt.note.self_test if attempt.note else ""
        raise Skipped(f"read back, not proven: {said or 'no self-test'}; {e}") from e
    if proven and finding.status == "ok":
        return ok(f"{finding.measured}; plugin's self-test passed", finding.expected)
    return finding


def _against_reference(subject: Subject, found: Evidence, values: Float) -> Finding:
    checkpoint = Checkpoint.found(subject.checkpoint)
    if checkpoint is None:
        raise NoReference("the server's checkpoint is not on this machine")
    profile, ids = subject.profile, found.plain_ids[:MOST_TOKENS]
    near = {b + d for b in profile.boundaries for d in (-1, 0, 1) if b + d >= 0}
    exact = streams(checkpoint, profile.tensors.embed_tokens, ids, near)
    captured = values[: len(ids), : len(profile.boundaries)]
    similar = {}
    for index, boundary in enumerate(profile.boundaries):
        for layer in (boundary - 1, boundary, boundary + 1):
            if layer in exact:
                similar[index, layer] = max(
                    _similar(captured[:, index], exact[layer], shift) for shift in OFFSETS
                )
    nearest = [
        max((layer for i, layer in similar if i == index), key=lambda n, i=index: similar[i, n])  # type: ignore[misc]
        for index in range(len(profile.boundaries))
    ]
    worst = min(similar[i, b] for i, b in enumerate(profile.boundaries))
    expected = f"boundaries {list(profile.boundaries)}, cosine at least {LEAST_COSINE}"
    if tuple(nearest) == profile.boundaries and worst >= LEAST_COSINE:
        return ok(f"cosine {worst:.5f} to a forward pass of our own", expected)
    return red(
        f"the rows are the streams entering layers {nearest} (cosine {worst:.4f} to the wanted ones)",
        expected,
        "the engine counts layers otherwise: install the capture plugin of this version, which reads "
        "the layers back, or translate the flag --return-aux-hidden-state-layer-ids by one",
    )


def _similar(captured_TH: Float, exact_TH: Float, shift: int) -> float:
    """Mean cosine where row t + shift is compared with token t; a shift is for `alignment` to name."""
    rows = captured_TH[max(shift, 0) : len(captured_TH) + min(shift, 0)]
    tokens = exact_TH[max(-shift, 0) : len(exact_TH) + min(-shift, 0)]
    return float(cosines(rows, tokens).mean())


@dataclass(frozen=True, slots=True)
class FinalFit:
    """How well states, read at an offset and normed here or not, predict the server's own answer."""

    offset: int
    normed: bool
    error: float
    agreed: int
    clear: int


def final_fit(subject: Subject, found: Evidence) -> FinalFit:
    """The reading of the final states that explains the server's log-probabilities best.

    State t predicts token t + 1. Raises Skipped.
    """
    values = rows_of_probe(subject, found, "answered")
    checkpoint = Checkpoint.found(subject.checkpoint)
    if checkpoint is None:
        raise Skipped("lm_head is not on this machine: the server's checkpoint lies elsewhere")
    if not isinstance(found.alone, Answer) or not found.alone.top:
        raise Skipped("the server gave no log-probabilities")
    first = len(found.plain_ids) - 1
    if first < 1:
        raise Skipped("the probe is too short")
    profile, config = subject.profile, readable(checkpoint).config
    states = values[first - 1 : first + len(found.alone.output_ids) + 1, -1]
    try:
        weight = checkpoint.tensor(profile.tensors.norm)
        here = normalised(states, weight, float(config.get("rms_norm_eps") or 1e-6))
        head = profile.tensors.lm_head
        if not checkpoint.has(head) and config.get("tie_word_embeddings"):
            head = profile.tensors.embed_tokens
        both = np.concatenate([states, here])
        logits_NV = np.concatenate([both @ block.T for block in checkpoint.blocks(head)], axis=1)
    except (NoTensor, CorruptFile) as e:
        raise Skipped(str(e)) from e
    logits_NV -= logits_NV.max(-1, keepdims=True)
    logits_NV -= np.log(np.exp(logits_NV).sum(-1, keepdims=True))
    fits = [
        _fit(found.alone, logits_NV[normed * len(states) :][: len(states)], offset, normed)
        for normed in (False, True)
        for offset in OFFSETS
    ]
    return min(fits, key=lambda f: f.error)


def _fit(answer: Answer, scores_NV: Float, offset: int, normed: bool) -> FinalFit:
    errors, agreed, clear = [], 0, 0
    for place, (token, top) in enumerate(zip(answer.output_ids, answer.top, strict=True)):
        row = 1 + place + offset
        if not 0 <= row < len(scores_NV):
            continue
        errors += [abs(float(scores_NV[row, i]) - score) for score, i in top]
        if len(top) > 1 and top[0][0] - top[1][0] > CLEAR_GAP:
            clear += 1
            agreed += int(scores_NV[row].argmax()) == token
    return FinalFit(offset, normed, float(np.mean(errors)), agreed, clear)


def _kept_fit(subject: Subject, found: Evidence) -> FinalFit:
    """As `final_fit`, computed once: it reads the whole of lm_head."""
    if "fit" not in found.kept:
        found.kept["fit"] = final_fit(subject, found)
    fit: FinalFit = found.kept["fit"]
    return fit


def check_alignment(subject: Subject, found: Evidence) -> Finding:
    """Row t belongs to token t: its final state predicts token t + 1."""
    fit = _kept_fit(subject, found)
    if fit.error > MOST_ERROR:
        raise Skipped("no reading of the final states explains the answer: see `final-state`")
    if fit.offset == 0:
        return ok("row t predicts token t + 1", "row t predicts token t + 1")
    return red(
        f"row t predicts token t + {1 - fit.offset}: rows are shifted by {fit.offset:+d} against ids",
        "row t predicts token t + 1",
        "the engine hands over rows of neighbouring tokens: SGLang >= 0.5.17 with the capture plugin "
        "of this version is needed",
    )


def check_final_state(subject: Subject, found: Evidence) -> Finding:
    """lm_head over the final state gives the server's own log-probabilities and greedy tokens."""
    fit, profile = _kept_fit(subject, found), subject.profile
    expected = (
        f"{profile.final_norm}-norm states: log-probabilities within {MOST_ERROR}, the same tokens"
    )
    measured = (
        f"{fit.error:.3f} nats off on average, {fit.agreed} of {fit.clear} clear tokens the same"
    )
    wants_norm = profile.final_norm == "pre"
    if fit.error > MOST_ERROR or fit.agreed < fit.clear:
        return red(
            f"at best {measured}",
            expected,
            "the final column is no state that lm_head reads: check the plugin's version, the "
            "profile's tensor names, and that the checkpoint here is the served one",
        )
    if fit.normed != wants_norm:
        kind = "before" if fit.normed else "after"
        return red(
            f"the rows hold the final state {kind} the final norm",
            expected,
            "use the capture plugin of this version, which takes the state that lm_head reads; or "
            f"set final_norm: {'pre' if fit.normed else 'post'} in the profile",
        )
    return ok(measured, expected)
