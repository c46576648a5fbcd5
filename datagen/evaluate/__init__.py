"""Evaluate a drafter on held-out samples."""

from datagen.evaluate.config import EvaluateConfig, evaluate_config
from datagen.evaluate.job import evaluate

__all__ = ["EvaluateConfig", "evaluate", "evaluate_config"]
