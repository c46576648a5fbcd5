"""How rows are fanned out. Nothing here changes what is collected."""

from __future__ import annotations

from pydantic import Field

from datagen.fanout.breaker import BreakerConfig
from datagen.fanout.pace import PaceConfig
from datagen.fanout.window import WindowConfig
from datagen.strict import StrictModel


class DispatchConfig(StrictModel):
    """The settings of a dispatcher and of its parts."""

    window: WindowConfig = WindowConfig()
    breaker: BreakerConfig = BreakerConfig()
    pace: PaceConfig = PaceConfig()
    attempts: int = Field(default=3, ge=1)
    """Failures of its own after which a row is rejected."""
    deaths: int = Field(default=3, ge=1)
    """Server failures in whose midst a row was, after which it is tried alone."""
    patience_s: float = Field(default=300.0, gt=0)
    """Seconds without any server alive before the run stops; what is collected stays."""
    poll_s: float = Field(default=1.0, gt=0)
    """How often a server is asked for its queue."""
