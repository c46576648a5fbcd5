"""The collect job, without Prefect."""

from datagen.collect.job import CollectJob
from datagen.collect.progress import ProgressSnapshot

__all__ = ["CollectJob", "ProgressSnapshot"]
