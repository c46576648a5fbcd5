"""The seam between the dispatcher and a server: what a row needs, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from datagen.target.client import Capture, Generation
from datagen.target.load import ServerLoad
from datagen.target.profile import Sampling
from datagen.target.tokens import Message


class Endpoint(Protocol):
    """A server that answers rows; `SGLangClient` is one, tests script another."""

    url: str

    async def healthy(self) -> bool:
        """True when the server answers now."""
        ...

    async def load(self) -> ServerLoad | None:
        """What the server says of its queue; None when it says nothing. Raises RequestFailure."""
        ...

    async def generate(
        self,
        input_ids: Sequence[int],
        *,
        rid: str,
        sampling: Sampling,
        max_new_tokens: int,
        stop_token_ids: Sequence[int],
        seed: int | None,
    ) -> Generation:
        """Answer a context; raises RowFailure, CapacityFailure, EndpointFailure."""
        ...

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        kwargs: dict[str, Any],
    ) -> list[int]:
        """The ids to which the server renders a conversation; raises as `generate`."""
        ...

    async def capture_states(self, input_ids: Sequence[int], *, rid: str) -> NDArray[np.float32]:
        """Have the hidden states of a sample in the answer; raises as `generate`."""
        ...

    async def capture(self, input_ids: Sequence[int], *, rid: str) -> Capture:
        """Have the hidden states of a sample written to the spool; raises as `generate`."""
        ...
