"""The command line. Every error is one line and an exit code."""

from datagen.cli import commands, plan, repair, retry
from datagen.cli.app import main

__all__ = ["commands", "main", "plan", "repair", "retry"]
