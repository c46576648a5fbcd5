"""What must be true before a step is spent, and what it probably means when it is not."""

from __future__ import annotations

from datagen.drafter.metrics import Acceptance
from datagen.errors import ConfigError, TrainingFailed

LEAST_AGREEMENT = (
    0.2  # of greedy or sampled text with its own target; another lm_head gives about 0
)


def require_same_target(result: Acceptance, model: str) -> None:
    """Raise ConfigError unless lm_head of the final states predicts the recorded tokens."""
    share = result.agreeing / result.compared if result.compared else 0.0
    if share < LEAST_AGREEMENT:
        raise ConfigError(
            f"the target's lm_head predicts {100 * share:.1f} % of the tokens recorded from {model}",
            fix="--target-weights names another checkpoint, or the states are not its final ones",
        )


def require_better_than_chance(result: Acceptance) -> None:
    """Raise TrainingFailed when a warm start proposes no better than one fixed token would."""
    first = result.conditional[0]
    if first <= result.best_constant:
        raise TrainingFailed(
            f"the init drafter scores at chance before any training: depth 1 hits "
            f"{100 * first:.1f} % of {result.eligible[0]} held-out rows, always proposing the most "
            f"frequent token {100 * result.best_constant:.1f} %",
            fix="likely causes: final states fed as boundaries, a rebuilt vocabulary map, another "
            "target or tokenizer, boundaries in another order; --allow-chance trains all the same",
        )
