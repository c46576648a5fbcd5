"""What is no answer, seeds, and the limits found out at start."""

from __future__ import annotations

import asyncio
import resource
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datagen.collect.answers import fault, looped_tail
from datagen.collect.conversation import row_seed
from datagen.collect.descriptors import ensure_descriptors
from datagen.collect.gate import PartitionGate
from datagen.errors import ConfigError

IDS = st.lists(st.integers(0, 5), max_size=60)


def slow_looped_tail(ids: list[int]) -> int:
    longest = 0
    for period in range(1, len(ids) // 2 + 1):
        n = 0
        while n + period < len(ids) and ids[-1 - n] == ids[-1 - n - period]:
            n += 1
        if n >= period:
            longest = max(longest, n + period)
    return longest


@given(IDS)
def test_the_looped_tail_is_the_longest_repeated_end(ids: list[int]) -> None:
    assert looped_tail(np.array(ids, dtype=np.int32)) == slow_looped_tail(ids)


def test_only_an_empty_or_looping_answer_is_a_fault() -> None:
    def found(*ids: int, loop_tokens: int = 256) -> str | None:
        return fault(np.array(ids, dtype=np.int32), [2], loop_tokens)

    varied = range(100, 500)
    assert found(*varied) is None
    assert found(2) == found() == found(2, 2) == "empty_output"
    assert found(*varied, *[7, 8, 9] * 90, 2) == "repetition_loop"
    assert found(*varied, *[7, 8, 9] * 90, 2, loop_tokens=0) is None
    assert found(*varied, *[7, 8, 9] * 20, 2) is None, "a table has repetitions too"


def test_a_seed_depends_on_run_row_and_turn_and_on_refused_answers_alone() -> None:
    seeds = [row_seed(r, p, t, n) for r in (0, 1) for p in "ab" for t in (0, 1) for n in (0, 1)]
    assert len(set(seeds)) == len(seeds)
    assert seeds[0] == row_seed(0, "a", 0)
    assert all(0 <= s < 2**31 for s in seeds)


def test_too_few_descriptors_are_named_before_a_row_is_sent() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ensure_descriptors(1)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)
    if hard == resource.RLIM_INFINITY:
        pytest.skip("this system sets no limit on open files")
    with pytest.raises(ConfigError, match="open files are needed"):
        ensure_descriptors(hard)


@dataclass
class Servers:
    capacity: int
    hungry: bool = False


async def test_a_gate_follows_the_servers_windows() -> None:
    servers = Servers(capacity=10)
    gate = PartitionGate(10, lambda: servers)
    await gate.admit()
    await gate.admit()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(gate.admit(), 0.05)
    gate.release()
    await asyncio.wait_for(gate.admit(), 60)
    servers.capacity = 20
    await asyncio.wait_for(gate.admit(), 60)


async def test_a_gate_opens_wider_while_servers_could_stand_idle() -> None:
    servers = Servers(capacity=10, hungry=True)
    gate = PartitionGate(10, lambda: servers)
    for _ in range(3):
        await asyncio.wait_for(gate.admit(), 60)
    servers.hungry = False
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(gate.admit(), 0.5)
    servers.hungry = True
    for _ in range(5):
        await asyncio.wait_for(gate.admit(), 60)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(gate.admit(), 0.5)


async def test_a_gate_opens_no_wider_while_many_rows_are_unfinished() -> None:
    gate = PartitionGate(10, lambda: Servers(capacity=10, hungry=True))
    for _ in range(3):
        await asyncio.wait_for(gate.admit(), 60)
        gate.opened(10)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(gate.admit(), 0.5)
    gate.ended()
    await asyncio.wait_for(gate.admit(), 60)
