"""The command line. Every error is one line and an exit code."""

from datagen.cli import (
    breakeven,
    commands,
    evaluate,
    export,
    finetune,
    inspect,
    launch,
    plan,
    preflight,
    repair,
    report,
    retry,
    spool,
)
from datagen.cli.app import main

__all__ = [
    "breakeven",
    "commands",
    "evaluate",
    "export",
    "finetune",
    "inspect",
    "launch",
    "main",
    "plan",
    "preflight",
    "repair",
    "report",
    "retry",
    "spool",
]
