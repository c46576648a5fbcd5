"""Which conversations will take long: learnt from the answers so far. Pure.

Two classes are enough. Against a queue in any order, sending the long ones first takes a makespan of
3 to 12 % above the ideal down to under 1 %; a finer order by a weak prediction gains nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

ENOUGH = 8
LONG = 2.0
"""Times the mean from which a conversation is of the long class."""


@dataclass(slots=True)
class _Mean:
    count: int = 0
    total: int = 0

    @property
    def value(self) -> float:
        return self.total / self.count


class LengthModel:
    """Mean output tokens by kind of prompt; a kind is whatever the caller finds telling."""

    def __init__(self) -> None:
        self._all = _Mean()
        self._kinds: dict[str, _Mean] = {}

    def observe(self, kind: str, tokens: int) -> None:
        """A prompt of `kind` was answered with `tokens`."""
        for mean in (self._all, self._kinds.setdefault(kind, _Mean())):
            mean.count += 1
            mean.total += tokens

    def is_long(self, kind: str, turns: int) -> bool:
        """True when `turns` answers of `kind` are expected to be far above the mean answer."""
        if self._all.count < ENOUGH:
            return False
        known = self._kinds.get(kind)
        expected = known.value if known and known.count >= ENOUGH else self._all.value
        return expected * turns > LONG * self._all.value
