"""What SGLang's answers hold, read once and checked: generations, captures, errors."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from datagen.target.failures import CapacityFailure, EndpointFailure, RequestFailure, RowFailure

SPOOL_FULL = "spool_full"
SPOOL_BUSY = "SpoolBusy:"  # the error's type leads the text of a refused capture's note
ROW_FAULTS = (400, 408, 413, 422)


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer. `output_ids`: int32 [n], the engine's, the stop token included when one ended it."""

    output_ids: NDArray[np.int32]
    text: str
    finish_reason: str
    matched: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    num_retractions: int
    spec_verify_ct: int | None
    top_logprobs: list[Any] | None = None
    spec_num_correct_drafts: int | None = None
    spec_histogram: tuple[int, ...] | None = None
    """Verify steps by the number of drafts accepted, before the output is cut."""


@dataclass(frozen=True, slots=True)
class Capture:
    """Where the engine leaves the hidden states of one prefill, and what it says they are."""

    path: Path
    n_tokens: int
    width: int
    n_bytes: int
    boundaries: tuple[int, ...]
    final_norm: str
    server: str
    next_token: int
    protocol: int = 0
    """The version of request, answer and file that the plugin speaks; see capture/spool.py."""
    spares: bool = False
    """Whether the plugin writes captures over the memory of those that are handed back."""
    self_test: str = ""
    """What the plugin proved about its boundaries inside the engine; begins with passed, pending, none."""


def generation_of(answer: dict[str, Any]) -> Generation:
    """Read an answer of `/generate`. Raises RowFailure, EndpointFailure."""
    meta = answer["meta_info"]
    finish = meta.get("finish_reason") or {}
    kind, matched = str(finish.get("type")), finish.get("matched")
    if kind == "abort":
        raise EndpointFailure("aborted", str(finish.get("message", "")))
    output_ids = _token_ids(answer["output_ids"])
    if kind == "stop" and isinstance(matched, int) and matched not in output_ids[-1:].tolist():
        # some versions trim it; the drafter must learn to stop
        output_ids = np.append(output_ids, np.int32(matched))
    return Generation(
        output_ids=output_ids,
        text=str(answer.get("text", "")),
        finish_reason=kind,
        matched=None if matched is None else str(matched),
        prompt_tokens=int(meta["prompt_tokens"]),
        completion_tokens=int(meta["completion_tokens"]),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        num_retractions=int(meta.get("num_retractions") or 0),
        spec_verify_ct=None if "spec_verify_ct" not in meta else int(meta["spec_verify_ct"]),
        spec_num_correct_drafts=(
            None if "spec_num_correct_drafts" not in meta else int(meta["spec_num_correct_drafts"])
        ),
        spec_histogram=(
            tuple(int(n) for n in meta["spec_correct_drafts_histogram"])
            if meta.get("spec_correct_drafts_histogram")
            else None
        ),
    )


def capture_of(answer: dict[str, Any]) -> Capture:
    """Read the note that a capture leaves in its answer. Raises RowFailure, CapacityFailure."""
    notes = answer["meta_info"].get("datagen")
    if not isinstance(notes, list) or not notes or not isinstance(notes[0], Mapping):
        raise RowFailure(
            "capture_not_live",
            "the answer holds no meta_info.datagen: the capture plugin is not loaded",
            permanent=True,
        )
    note = notes[0]
    if str(note.get("error", "")).startswith(SPOOL_BUSY):
        raise CapacityFailure(SPOOL_FULL, str(note["error"]))
    if "error" in note:
        raise RowFailure("capture_failed", str(note["error"]))
    try:
        return Capture(
            path=Path(str(note["path"])),
            n_tokens=int(note["rows"]),
            width=int(note["width"]),
            n_bytes=int(note["bytes"]),
            boundaries=tuple(int(b) for b in note["boundaries"]),
            final_norm=str(note["final_norm"]),
            server=str(note["server"]),
            next_token=int(answer["output_ids"][0]),
            protocol=int(note.get("protocol") or 0),
            spares=bool(note.get("spares")),
            self_test=str(note.get("self_test") or ""),
        )
    except (KeyError, TypeError, ValueError, IndexError) as e:
        raise RowFailure("capture_malformed", f"{type(e).__name__}: {e}") from e


def _token_ids(value: Any) -> NDArray[np.int32]:
    """A list of integers as int32 [n], every element checked. Raises RowFailure.

    A tenth of the list's memory, of which a burst of answers would hold a thousand; numpy's own ways
    from a list take twice the time, and some of them floats.
    """
    try:
        if not isinstance(value, list):
            raise TypeError(f"{type(value).__name__} is no list")
        return np.frombuffer(struct.pack(f"{len(value)}i", *value), dtype=np.int32)
    except (TypeError, struct.error) as e:
        raise RowFailure("malformed_answer", f"output_ids: {e}") from e


def failure_of(status: int, detail: str, retry_after: str | None) -> RequestFailure:
    """What an HTTP error means: for the row (400, 413, 422), for the window, or for the endpoint."""
    reason = f"http_{status}"
    if status in (429, 503):
        wait_s = float(retry_after) if retry_after and retry_after.isdecimal() else None
        return CapacityFailure(reason, detail, retry_after_s=wait_s)
    if status in ROW_FAULTS:
        if "longer than the model's context length" in detail:
            return RowFailure("over_context", detail, permanent=True)
        return RowFailure(reason, detail)
    # anything else (no such route, not authorised, 5xx) says nothing about the row
    return EndpointFailure(reason, detail, in_flight=status >= 500)


def message_of(payload: bytes) -> str:
    """The error text of a body: SGLang's {"error": {"message"}}, or its beginning as it is."""
    try:
        body = orjson.loads(payload)
        error = body["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return payload[:200].decode(errors="replace").strip()
