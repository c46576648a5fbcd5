"""What a turn is asked with: its messages, and their token ids once somebody has rendered them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from datagen.fanout.endpoint import Endpoint
from datagen.target.tokens import Message, Renderer, template_kwargs


@dataclass(slots=True)
class Context:
    """One turn's context. `ids`: None until it is rendered, and never rendered twice."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    thinking: bool | None
    thinking_kwarg: str | None
    ids: list[int] | None = None

    def render(self, renderer: Renderer) -> None:
        """Here, by the tokenizer of the run."""
        self.ids = renderer.render(self.messages, self.tools, self.thinking)

    async def ids_at(self, endpoint: Endpoint) -> list[int]:
        """The ids; rendered by `endpoint`, which is about to answer them, where nobody has so far.

        All servers of a run render alike, which preflight has proven. Raises as `Endpoint.generate`.
        """
        if self.ids is None:
            kwargs = template_kwargs(self.thinking_kwarg, self.thinking)
            self.ids = await endpoint.render(self.messages, self.tools, kwargs)
        return self.ids

    @property
    def known_ids(self) -> list[int]:
        """The ids of a context that was answered."""
        assert self.ids is not None
        return self.ids
