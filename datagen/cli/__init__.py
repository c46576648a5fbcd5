"""The command line. Every error is one line and an exit code."""

from datagen.cli import commands, launch, plan, preflight, spool
from datagen.cli.app import main

__all__ = ["commands", "launch", "main", "plan", "preflight", "spool"]
