"""A logger that speaks in the Prefect UI inside a run, and plainly outside of one."""

from __future__ import annotations

import logging
from logging import LoggerAdapter
from typing import Any

from prefect import get_run_logger
from prefect.exceptions import MissingContextError

Logger = logging.Logger | LoggerAdapter[Any]


def flow_logger() -> Logger:
    """The run's logger, or the module's."""
    try:
        return get_run_logger()
    except MissingContextError:
        return logging.getLogger("datagen")
