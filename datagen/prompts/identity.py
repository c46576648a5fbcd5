"""What makes two prompts the same prompt, and every pseudo-random choice that is made of it.

A prompt is its messages, its tools and its thinking flag. Where it came from, its position in a
file and the id a data set gave it are no part of it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

U64 = npt.NDArray[np.uint64]


def canonical_json(value: Any) -> bytes:
    """UTF-8 JSON without spaces, keys sorted. Raises TypeError on what JSON cannot say."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def content_id(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> bytes:
    """32 bytes that name the conversation skeleton and its tools, before thinking is decided."""
    return hashlib.sha256(canonical_json({"messages": messages, "tools": tools})).digest()


def prompt_id(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, thinking: bool | None
) -> str:
    """sha256, as 64 hex digits, over the canonical JSON of messages, tools and thinking."""
    document = {"messages": messages, "thinking": thinking, "tools": tools}
    return hashlib.sha256(canonical_json(document)).hexdigest()


def prompt_id_of_parts(messages: str, tools: str | None, thinking: bool | None) -> str:
    """`prompt_id` of messages that are canonical JSON already, and tools that are JSON of any form."""
    parts = (
        b'{"messages":', messages.encode(),
        b',"thinking":', orjson.dumps(thinking),
        b',"tools":', b"null" if tools is None else canonical_json(orjson.loads(tools)), b"}",
    )  # fmt: skip
    return hashlib.sha256(b"".join(parts)).hexdigest()


def mix64(values: U64) -> U64:
    """The finaliser of splitmix64: a bijection of 64-bit words whose output bits look random."""
    x = np.asarray(values, dtype=np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)), dtype=np.uint64)


def draw(content_ids: U64, purpose: str, seed: int) -> U64:
    """64 pseudo-random bits a prompt for one purpose: a function of content, purpose and seed only.

    `content_ids`: the first 8 bytes of each content id, as uint64 [n].
    """
    salt = hashlib.blake2b(f"{purpose}/{seed}".encode(), digest_size=8).digest()
    return mix64(np.asarray(content_ids, dtype=np.uint64) ^ np.uint64(int.from_bytes(salt, "big")))


def below(draws: U64, share: float) -> npt.NDArray[np.bool_]:
    """True for the prompts whose draw falls into the first `share` (0..1) of all draws."""
    return np.asarray((draws >> np.uint64(11)).astype(np.float64) * 2.0**-53 < share)


def set_digest(prompt_ids: list[str]) -> str:
    """sha256 of a set of prompts: of its sorted ids, one a line."""
    return hashlib.sha256("\n".join(sorted(prompt_ids)).encode()).hexdigest()
