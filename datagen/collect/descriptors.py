"""Open files: a connection for each row in flight. Found out at start, not as a thousand failed rows."""

from __future__ import annotations

import resource

from datagen.errors import ConfigError

OWN = 256
"""Besides connections: shards and journals, libraries, the event loop."""
PLENTY = 8192


def ensure_descriptors(connections: int) -> None:
    """Raise the soft limit of open files to what `connections` need, and to PLENTY where that is allowed:
    captures on their way are mapped, a descriptor each. Raises ConfigError.
    """
    needed = connections + OWN
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(needed, PLENTY if hard == resource.RLIM_INFINITY else min(PLENTY, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"{needed} open files are needed for {connections} rows in flight, {hard} are allowed",
            fix=f"raise the limit (`ulimit -Hn {needed}`), or lower --max-concurrency",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
