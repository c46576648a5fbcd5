"""Checks of a capture: the plugin answers; rows are wide enough, here, complete, alive, right in company."""

from __future__ import annotations

import os
import shutil

import numpy as np

from datagen.capture.spool import PROTOCOL
from datagen.errors import CaptureUnproven
from datagen.target.answers import SPOOL_FULL
from datagen.target.capture import WRONG_WIDTH_FIX
from datagen.target.checks.probes import Attempt, Evidence
from datagen.target.checks.subject import Subject, chunk_of
from datagen.target.checks.verdict import Finding, Skipped, ok, red
from datagen.target.failures import RequestFailure
from datagen.target.weights import Float

LEAST_COSINE = 0.999
MOST_SKEW_S = 60.0
PLUGIN_FIX = (
    "install datagen into the server's environment (`pip install --no-deps datagen`) and start it with "
    "DATAGEN_CAPTURE_DIR and DATAGEN_CAPTURE_BOUNDARIES (`datagen launch --role capture`)"
)


def rows_of_probe(subject: Subject, found: Evidence, name: str = "plain") -> Float:
    """float32 [tokens, K+1, hidden] of a probe. Raises Skipped where it gave no rows."""
    attempt = found.captures.get(name)
    if not subject.captures:
        raise Skipped("this server does not capture")
    if attempt is None or attempt.bits is None:
        raise Skipped("there are no rows to look at: see the red checks")
    return attempt.values(subject.profile.capture_dtype, subject.profile.hidden_size)


def check_plugin(subject: Subject, found: Evidence) -> Finding:
    """A capture is answered by our plugin, of our protocol."""
    first = _first(subject, found)
    expected = f"an answer of the capture plugin, protocol {PROTOCOL}"
    if first.note is not None:
        said = f"{first.note.server}, protocol {first.note.protocol}"
        if first.note.protocol == PROTOCOL:
            return ok(said, expected)
        return red(
            said,
            expected,
            "install this version of datagen into the server's environment, and restart the server",
        )
    if isinstance(first.failure, RequestFailure) and _is_busy(first.failure):
        return ok("it answers, and has no room", expected)
    if isinstance(first.failure, RequestFailure) and first.failure.reason == "capture_failed":
        return red(
            first.failure.detail, expected, "follow the plugin's message; see the server's log"
        )
    return red(str(first.failure), expected, PLUGIN_FIX)


def check_width(subject: Subject, found: Evidence) -> Finding:
    """A row is the boundaries and the final state wide."""
    attempt, profile = found.captures.get("plain"), subject.profile
    hidden = profile.hidden_size
    expected = f"{profile.row_width} = {len(profile.boundaries)} boundaries and the final state of {hidden}"
    if not subject.captures:
        raise Skipped("this server does not capture")
    if attempt is None:
        raise Skipped("nothing was captured")
    if attempt.note is not None and attempt.note.width != profile.row_width:
        width = attempt.note.width
        named = " = the final state alone, as with EAGLE for EAGLE3" if width == hidden else ""
        return red(f"the engine captures {width} values a token{named}", expected, WRONG_WIDTH_FIX)
    declared = attempt.note and attempt.note.boundaries == profile.boundaries
    if isinstance(attempt.failure, CaptureUnproven) and (attempt.note is None or declared):
        return red(attempt.failure.what, expected, str(attempt.failure.fix))
    if attempt.note is None and attempt.bits is None:
        raise Skipped("nothing was captured")
    return ok(f"{profile.row_width} {profile.capture_dtype}", expected)


def check_spool(subject: Subject, found: Evidence) -> Finding:
    """The spool lies on a file system seen from here, with room for what a run keeps in flight."""
    first, need = _first(subject, found), subject.spool_bytes
    expected = f"a directory on this machine with {need / 1e9:.2f} GB free"
    more = "make room there, lower --spool-mib, or give the server another DATAGEN_CAPTURE_DIR"
    if isinstance(first.failure, RequestFailure) and _is_busy(first.failure):
        return red(first.failure.detail, expected, more)
    if first.note is None:
        raise Skipped("the server named no file")
    directory = first.note.path.parent
    if not directory.is_dir() or (
        isinstance(first.failure, RequestFailure) and first.failure.reason == "capture_absent"
    ):
        return red(
            f"{first.note.path} is not seen from here",
            expected,
            "collect on the server's own host, or set DATAGEN_CAPTURE_DIR to a directory both mount",
        )
    if not os.access(directory, os.W_OK):
        return red(
            f"{directory} cannot be written by this user",
            expected,
            "run server and collector as one user: files are removed once they are stored",
        )
    free = shutil.disk_usage(directory).free
    if free < need:
        return red(f"{free / 1e9:.2f} GB free in {directory}", expected, more)
    return ok(f"{directory}, {free / 1e9:.1f} GB free", expected)


def check_rows(subject: Subject, found: Evidence) -> Finding:
    """As many rows as tokens: alone, beyond a chunk, in a batch, after the same prefix."""
    rows_of_probe(subject, found)
    expected = "as many rows as tokens"
    cut = chunk_of(found.info)
    if subject.mode == "json" and cut:
        return red(
            f"the server prefills in chunks of {cut} tokens, which loses rows of JSON states",
            expected,
            "start it with --chunked-prefill-size -1, or capture through the spool",
        )
    tries = {
        "repeated": [found.captures["repeated"]], "long": [found.captures["long"]],
        "batch": found.batched,
    }  # fmt: skip
    fixes = {
        "repeated": "the prefix cache hid rows: use a server that honours extra_key, or "
        "--disable-radix-cache",
        "long": "rows of all chunks but the last were lost: install the capture plugin of this "
        "version, or start the server with --chunked-prefill-size -1",
        "batch": "rows of a batch were lost or mixed up: SGLang >= 0.5.17 is needed",
    }
    lost = {name: [a for a in group if a.bits is None] for name, group in tries.items()}
    for name, group in lost.items():
        if group:
            return red(f"{name} prompt: {group[0].failure}", expected, fixes[name])
    long = len(found.captures["long"].ids)
    beyond = f" in chunks of {cut}" if cut and long > cut else ""
    return ok(
        f"{len(found.plain_ids)} alone and after the same prefix, {long} long{beyond}, "
        f"{sum(len(a.ids) for a in found.batched):,} in a batch of {len(found.batched)}",
        expected,
    )


def check_values(subject: Subject, found: Evidence) -> Finding:
    """Every boundary varies from token to token and is finite."""
    values = rows_of_probe(subject, found)
    for index, name in enumerate([*map(str, subject.profile.boundaries), "final"]):
        part = values[:, index]
        if not np.isfinite(part).all() or not part.any() or (part == part[:1]).all():
            return red(
                f"boundary {name} is constant, all zero or not finite",
                "values that differ between tokens",
                "the engine hands over an unset buffer: update it, or disable prefill graphs",
            )
    return ok(f"rms {np.sqrt(np.square(values).mean()):.2f}", "finite, different for every token")


def check_batch(subject: Subject, found: Evidence) -> Finding:
    """The states of a prompt do not depend on what is prefilled beside it."""
    alone = rows_of_probe(subject, found)
    profile = subject.profile
    again = [
        a.values(profile.capture_dtype, profile.hidden_size)
        for a in found.batched
        if a.bits is not None and a.ids == found.plain_ids
    ]
    if not again:
        raise Skipped("its rows in a batch are missing: see `rows`")
    beside = sum(len(a.ids) for a in found.batched)
    worst = min(float(cosines(alone, other).mean(0).min()) for other in again)
    measured = f"mean cosine {worst:.5f}, among {beside:,} tokens"
    expected = f"at least {LEAST_COSINE}"
    if worst >= LEAST_COSINE:
        return ok(measured, expected)
    return red(
        measured,
        expected,
        "states are not reduced over ranks in large batches (SGLang before 0.5.14 with Kimi-K2.5): "
        "update it, or start it with --enforce-disable-flashinfer-allreduce-fusion",
    )


def check_clock(subject: Subject, found: Evidence) -> Finding:
    """The spool's time stamps and this machine's clock agree: files are swept by age."""
    first = _first(subject, found)
    if first.age_s is None:
        raise Skipped("no file of the spool was seen")
    expected = f"within {MOST_SKEW_S:.0f} s of the spool's file system"
    if abs(first.age_s) <= MOST_SKEW_S:
        return ok(f"{first.age_s:.1f} s old when read", expected)
    return red(
        f"a file just written is {first.age_s:.0f} s old",
        expected,
        "set both clocks by NTP: files would be swept early, or never",
    )


def cosines(one: Float, other: Float) -> Float:
    """Cosine over the last axis."""
    norms = np.linalg.norm(one, axis=-1) * np.linalg.norm(other, axis=-1)
    result: Float = (one * other).sum(-1) / np.maximum(norms, 1e-20)
    return result


def _first(subject: Subject, found: Evidence) -> Attempt:
    if not subject.captures:
        raise Skipped("this server does not capture")
    if subject.mode == "json":
        raise Skipped("states come as JSON, without plugin and spool")
    return found.captures["plain"]


def _is_busy(failure: RequestFailure) -> bool:
    return failure.reason == SPOOL_FULL
