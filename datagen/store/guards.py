"""What is refused at the door of the store: states that no healthy engine hands over.

Peers trained on NaN, on all-zero states of a hybrid model, on buffers that were never filled; the
loss went down and acceptance was nil. So every sample is looked at before it is stored: its shape,
every value, and the norms of its boundaries against what the run has seen so far. The norms are
medians over a sample's tokens: attention sinks are hundreds of times larger, and say nothing.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from datagen.errors import ConfigError, StatesFaulty
from datagen.store.states import StatesSpec

NOT_FINITE = {"BF16": 0x7F80, "F16": 0x7C00}
"""By dtype: the smallest magnitude, as a bit pattern, that is infinite or NaN."""
NORM_TOKENS = 32  # enough for a median, spread over the sample

LEARNT_FROM = 32  # samples accepted before norms are judged at all, and between two lessons
REMEMBERED = 512  # samples whose norms are compared with
TOLERATED_FACTOR = 4.0  # a sample's median norm may always be this far from the run's
TOLERATED_SIGMAS = 10.0

JUDGED = 256  # samples that the fault rate is taken over
FEWEST_FAULTS = 8  # below, a rate says nothing


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a sample is not stored: `reason` is a short stable name for the books."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Sound:
    """A sample whose values can be stored. `norms`: median L2 norm over tokens, per layer [K+1]."""

    norms: tuple[float, ...]


def layer_name(spec: StatesSpec, layer: int) -> str:
    """A layer of a row as people know it: `boundary 15`, or `final state`."""
    final = layer == len(spec.boundaries)
    return "the final state" if final else f"boundary {spec.boundaries[layer]}"


def examine(rows_TW: NDArray[np.uint16], n_tokens: int, spec: StatesSpec) -> Sound | Refused:
    """Look at every value of a sample of `n_tokens`: bit patterns uint16 [n_tokens, (K+1)*H].

    Pure and thread-safe. Raises ConfigError for a dtype that cannot be stored.
    """
    limit = _limit_of(spec)
    if rows_TW.dtype != np.uint16:
        return Refused("states_dtype", f"{rows_TW.dtype} where 16-bit patterns are due")
    if rows_TW.ndim != 2 or len(rows_TW) != n_tokens or n_tokens < 1:
        return Refused("states_rows", f"rows of shape {rows_TW.shape} for {n_tokens} tokens")
    if rows_TW.shape[1] != spec.width:
        return Refused(
            "states_width",
            f"{rows_TW.shape[1]} values a token, {spec.n_layers} x {spec.hidden_size} are due",
        )
    bits_TLH = rows_TW.reshape(n_tokens, spec.n_layers, spec.hidden_size)
    highest_TL, lowest_TL = extremes(bits_TLH)
    for layer in range(spec.n_layers):
        name, high_T = layer_name(spec, layer), highest_TL[:, layer]
        bad_T = high_T >= limit
        if bad_T.any():
            first = int(bad_T.argmax())
            return Refused(
                "states_not_finite",
                f"{name} holds NaN or infinity in {int(bad_T.sum())} of {n_tokens} rows, "
                f"first in row {first}",
            )
        # The embeddings themselves (boundary 0) may hold zero rows: padding tokens of some models.
        flat_T = (high_T == lowest_TL[:, layer]) & (spec.hidden_size > 1)
        if flat_T.any() and not (layer < len(spec.boundaries) and spec.boundaries[layer] == 0):
            first = int(flat_T.argmax())
            what = "all zero" if not high_T[first] else "one value in every channel"
            return Refused(
                "states_constant",
                f"{name} is {what} in {int(flat_T.sum())} of {n_tokens} rows, first in row {first}",
            )
        if repeats(bits_TLH[:, layer], high_T):
            return Refused("states_constant", f"{name} is the same for all {n_tokens} tokens")
    return Sound(_median_norms(bits_TLH, spec.dtype))


def extremes(bits_TLH: NDArray[np.uint16]) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Largest and smallest magnitude of every row, as bit patterns without their sign: both [T, L]."""
    from datagen.store import kernels

    highest_TL, lowest_TL = np.empty((2, *bits_TLH.shape[:2]), dtype=np.uint16)
    kernels.extremes(np.ascontiguousarray(bits_TLH), highest_TL, lowest_TL)
    return highest_TL, lowest_TL


def repeats(bits_TH: NDArray[np.uint16], high_T: NDArray[np.uint16]) -> bool:
    """True when several tokens all have one and the same row. `high_T`: their largest magnitudes."""
    return (
        len(bits_TH) > 1
        and bool((high_T == high_T[0]).all())
        and bool((bits_TH == bits_TH[:1]).all())
    )


def _limit_of(spec: StatesSpec) -> int:
    try:
        return NOT_FINITE[spec.dtype]
    except KeyError:
        raise ConfigError(
            f"states of dtype {spec.dtype} cannot be stored",
            fix=f"have the engine capture one of {', '.join(NOT_FINITE)}",
        ) from None


def row_norms(bits_TLH: NDArray[np.uint16], dtype: str) -> NDArray[np.float64]:
    """L2 norm of every row, [T, L], from bit patterns of `dtype` (BF16 or F16)."""
    sums_TL = np.empty(bits_TLH.shape[:2])
    with np.errstate(invalid="ignore"):  # what is not finite is the caller's to name
        if dtype == "BF16":
            from datagen.store import kernels

            kernels.squares(np.ascontiguousarray(bits_TLH), sums_TL)
        else:
            values = bits_TLH.view(np.float16).astype(np.float32)
            np.einsum("tlh,tlh->tl", values, values, out=sums_TL)
        norms: NDArray[np.float64] = np.sqrt(sums_TL)
    return norms


def _median_norms(bits_TLH: NDArray[np.uint16], dtype: str) -> tuple[float, ...]:
    chosen = np.linspace(0, len(bits_TLH) - 1, min(NORM_TOKENS, len(bits_TLH))).astype(np.intp)
    return tuple(np.median(row_norms(bits_TLH[chosen], dtype), axis=0).tolist())


class NormRange:
    """The norms a run's samples have had, and whether another fits among them.

    In logarithms: a norm is a scale. Only accepted samples are remembered. Until `LEARNT_FROM`
    samples are, everything fits: preflight has proven the capture, and nothing is known yet.
    """

    def __init__(self, spec: StatesSpec) -> None:
        self._spec = spec
        self._recent: deque[tuple[float, ...]] = deque(maxlen=REMEMBERED)
        self._accepted = 0
        self._middle_L = self._allowed_L = np.zeros(spec.n_layers)

    def judge(self, norms: tuple[float, ...]) -> Refused | None:
        """None when `norms` fit, which are then remembered; else why not."""
        logs = tuple(math.log(max(n, 1e-30)) for n in norms)
        if self._accepted >= LEARNT_FROM:
            outside = np.abs(np.array(logs) - self._middle_L) > self._allowed_L
            if outside.any():
                layer = int(outside.argmax())
                usual = math.exp(self._middle_L[layer])
                return Refused(
                    "norm_out_of_range",
                    f"{layer_name(self._spec, layer)} has a median norm of {norms[layer]:.4g}, "
                    f"the run's samples have {usual:.4g}",
                )
        self._recent.append(logs)
        self._accepted += 1
        if self._accepted % LEARNT_FROM == 0:
            self._learn()
        return None

    def _learn(self) -> None:
        """Median and robust spread of what is remembered, per layer [K+1]."""
        seen_SL = np.array(self._recent)
        self._middle_L = np.median(seen_SL, axis=0)
        sigma_L = 1.4826 * np.median(np.abs(seen_SL - self._middle_L), axis=0)
        self._allowed_L = np.maximum(math.log(TOLERATED_FACTOR), TOLERATED_SIGMAS * sigma_L)


CAUSES = {
    "states_not_finite": "the engine overflows: serve in bfloat16, and without a quantized "
    "attention or KV cache kernel",
    "states_constant": "the engine hands over a buffer that was never filled: update it, or "
    "disable its prefill CUDA graphs and its prefix cache",
    "norm_out_of_range": "what answers has changed since the run began: check that every endpoint "
    "still serves the same revision, dtype and boundaries",
}
OTHER_CAUSE = "the engine's capture does not fit the profile: check its boundaries and its version"


class FaultRate:
    """Counts samples with a fault among the latest ones, and says when to stop the run."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._recent: deque[tuple[str | None, str]] = deque(maxlen=JUDGED)

    def accepted(self, server: str) -> None:
        """A sample from `server` was sound at its first capture."""
        self._recent.append((None, server))

    def refused(self, refused: Refused, server: str) -> None:
        """A sample from `server` was not. Raises StatesFaulty when too many of the latest were."""
        self._recent.append((refused.reason, server))
        faults = [(reason, s) for reason, s in self._recent if reason is not None]
        rate = len(faults) / len(self._recent)
        if len(faults) < FEWEST_FAULTS or rate <= self._limit:
            return
        reasons = Counter(reason for reason, _ in faults)
        servers = Counter(s for _, s in faults)
        asked = Counter(s for _, s in self._recent)
        worst = reasons.most_common(1)[0][0]
        raise StatesFaulty(
            f"{len(faults)} of the last {len(self._recent)} captures were refused "
            f"({', '.join(f'{n} {r}' for r, n in reasons.most_common())}; last: {refused.detail})",
            where=", ".join(f"{s}: {n} of {asked[s]}" for s, n in servers.most_common()),
            fix=CAUSES.get(worst, OTHER_CAUSE),
        )


class Guards:
    """The guards of a run: its norms and its fault rate. Belongs to one thread, `examine` to any."""

    def __init__(self, spec: StatesSpec, *, max_fault_rate: float) -> None:
        _limit_of(spec)
        self.spec = spec
        self._norms, self._rate = NormRange(spec), FaultRate(max_fault_rate)

    def judge(self, found: Sound | Refused, server: str, *, first: bool) -> Refused | None:
        """None when the sample may be stored, else why not.

        `first`: no capture of this sample was refused before; a sample counts once. Raises
        StatesFaulty when so many are refused that the engine must be at fault.
        """
        refused = found if isinstance(found, Refused) else self._norms.judge(found.norms)
        if first and refused is None:
            self._rate.accepted(server)
        elif first and refused is not None:
            self._rate.refused(refused, server)
        return refused
