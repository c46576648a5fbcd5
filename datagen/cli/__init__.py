"""The command line. Every error is one line and an exit code."""

from datagen.cli import commands, export, inspect, plan, repair, retry
from datagen.cli.app import main

__all__ = ["commands", "export", "inspect", "main", "plan", "repair", "retry"]
