"""The command line. Every error is one line and an exit code."""

from datagen.cli import commands, finetune, plan
from datagen.cli.app import main

__all__ = ["commands", "finetune", "main", "plan"]
