"""The command line. Every error is one line and an exit code."""

from datagen.cli import breakeven, commands, evaluate, finetune, plan, report
from datagen.cli.app import main

__all__ = ["breakeven", "commands", "evaluate", "finetune", "main", "plan", "report"]
