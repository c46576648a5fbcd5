"""The command line. Every error is one line and an exit code."""

from datagen.cli import (
    commands,
    export,
    finetune,
    inspect,
    launch,
    plan,
    repair,
    retry,
    spool,
)
from datagen.cli.app import main

__all__ = [
    "commands",
    "export",
    "finetune",
    "inspect",
    "launch",
    "main",
    "plan",
    "repair",
    "retry",
    "spool",
]
