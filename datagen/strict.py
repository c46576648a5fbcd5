"""The base of every configuration model: unknown keys are errors, values are frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from datagen.errors import ConfigError


class StrictModel(BaseModel):
    """A frozen pydantic model that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


M = TypeVar("M", bound=StrictModel)


def load_yaml(path: Path, model: type[M], error: type[ConfigError] = ConfigError) -> M:
    """Read `path` into `model`; raises `error` naming the file, the key and what is wrong."""
    try:
        data: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise error("no such file", where=path) from e
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise error(f"cannot be read as YAML: {e}", where=path) from e
    return parse(data, model, where=path, error=error)


def parse(
    data: Any, model: type[M], *, where: str | Path, error: type[ConfigError] = ConfigError
) -> M:
    """Validate `data` as `model`; every fault is named by its key in one line."""
    try:
        return model.model_validate(data)
    except ValidationError as e:
        faults = "; ".join(
            f"{'.'.join(map(str, f['loc'])) or 'top level'}: {f['msg']}" for f in e.errors()
        )
        raise error(faults, where=where) from e
