"""The error tree. Every error is one line that says what is wrong, where, and what to do."""

from __future__ import annotations

from pathlib import Path


class DatagenError(Exception):
    """Base of every error a user can meet; its text is `what (where): fix`, on one line."""

    def __init__(self, what: str, *, where: str | Path | None = None, fix: str | None = None):
        self.what, self.where, self.fix = what, None if where is None else str(where), fix
        text = what if where is None else f"{what} ({where})"
        super().__init__(" ".join((text if fix is None else f"{text}: {fix}").split()))


class ConfigError(DatagenError):
    """A setting is unknown, of the wrong type, or contradicts another."""


class MixError(ConfigError):
    """A mix file is missing, malformed, or its counts do not add up."""


class PromptDataError(DatagenError):
    """A prompt data file is missing, unreadable or truncated."""


class ProfileError(ConfigError):
    """A target profile is unknown or malformed."""


class RunLocked(DatagenError):
    """Another live process owns the run directory."""


class FingerprintMismatch(DatagenError):
    """The run directory holds rows made under other settings; the fields that differ are named."""


class CorruptFile(DatagenError):
    """A file on disk fails its checksum, its schema or its own length."""


class LimitReached(DatagenError):
    """The system gives this process no more open files, or no more memory or mappings."""


class StorageFull(DatagenError):
    """A file system has no room for the next write."""


class EndpointDown(DatagenError):
    """No server answers at an address."""


class WrongTarget(DatagenError):
    """A server answers but serves another model than the profile names."""


class CaptureUnproven(DatagenError):
    """The hidden states a server hands over are not what the drafter will be fed."""


class StatesFaulty(DatagenError):
    """So many captures are refused that the engine, not the rows, must be at fault."""


class PreflightRed(DatagenError):
    """Checks of the target are red, and their risk was not accepted by name."""


class VerifyFailed(DatagenError):
    """A finished or partial run does not hold what its records say."""


class RepairRefused(DatagenError):
    """Something is damaged that cannot be made anew from what is left."""


class ExportRefused(DatagenError):
    """A run cannot be written in a layout without saying something false."""


class NoSuchSample(DatagenError):
    """A name fits no sample of a run, or several."""


class RetryRefused(DatagenError):
    """No rejection stands that could be taken back."""


class PrefectUnavailable(DatagenError):
    """The Prefect server does not answer."""


class ServiceFailed(DatagenError):
    """A background process of `make up` cannot start, or its port is another's."""


class TrainingFailed(DatagenError):
    """A fine-tune cannot begin or go on: what it sees says that its weights would be worthless."""


class Interrupted(DatagenError):
    """The run was stopped on request; everything finished is on disk."""


class MeasurementError(DatagenError):
    """A measurement cannot be made, or cannot mean what it is asked for."""
