"""The pure parts: window, breaker, pace, watchdog, length classes, histogram; and a server's own figures."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datagen.fanout.breaker import Breaker, BreakerConfig, State
from datagen.fanout.histogram import Histogram
from datagen.fanout.lengths import LengthModel
from datagen.fanout.pace import Pace, PaceConfig, Watchdog
from datagen.fanout.window import Window, WindowConfig, window_limit
from datagen.target.load import ServerLoad, load_from_info, load_from_metrics


def settle(window: Window, slots: int, polls: int = 40) -> list[int]:
    """Sizes of a window that always has rows to send, at a server of `slots`."""
    sizes = []
    for _ in range(polls):
        while window.free:
            window.admit()
        while window.in_flight > window.size:
            window.release()
        running = min(slots, window.in_flight)
        window.observe(running, window.in_flight - running, 0.5)
        sizes.append(window.size)
    return sizes


@pytest.mark.parametrize("slots", [4, 64, 700])
def test_a_window_finds_what_a_server_can_run_and_keeps_it_full(slots: int) -> None:
    sizes = settle(Window(WindowConfig(initial=16, maximum=1024)), slots)
    assert all(slots <= size <= slots * 1.3 + 4 for size in sizes[15:]), sizes


def test_a_window_never_passes_the_graphs_of_a_server_unless_told() -> None:
    config = WindowConfig(initial=16)
    limit = window_limit(config, max_running=256, graph_batch=160)
    assert limit == 160
    assert max(settle(Window(config, limit=limit), 1000)) == 160
    assert window_limit(WindowConfig(beyond_graph=True), max_running=256, graph_batch=160) == 320
    assert window_limit(config) == 1024


def test_a_window_with_few_rows_does_not_grow_on_an_empty_queue() -> None:
    window = Window(WindowConfig(initial=32))
    window.admit()
    for _ in range(10):
        window.observe(1, 0)
    assert window.size == 32


def test_prompts_that_are_still_being_read_do_not_close_a_window() -> None:
    window = Window(WindowConfig(initial=32), limit=40)
    while window.free:
        window.admit()
    for running in (0, 0, 5, 5, 10, 16, 16, 24, 32):
        window.observe(running, 32 - running)
        assert window.size >= 32


def test_a_full_kv_cache_shrinks_the_window() -> None:
    window = Window(WindowConfig(initial=32))
    window.observe(32, 0, 0.99)
    assert window.size == 24


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 2000), st.floats(0, 1))))
def test_whatever_a_server_says_the_window_stays_within_its_bounds(
    polls: list[tuple[int, int, float]],
) -> None:
    window = Window(WindowConfig(initial=8, minimum=2), limit=100)
    for running, queued, usage in polls:
        while window.free:
            window.admit()
        window.observe(running, queued, usage)
        assert 2 <= window.size <= 100


def test_a_server_that_failed_while_healthy_is_tried_with_one_row() -> None:
    breaker = Breaker(BreakerConfig(failures=1, probe_every_s=1.0, max_probe_every_s=8.0))
    breaker.failed(0.0, "no progress", fatal=True)
    breaker.probed(0.0, healthy=True)
    assert breaker.state is State.TRIAL
    assert not breaker.probe_due(10.0), "the row is the probe"
    breaker.failed(1.0, "no progress", fatal=True)
    assert breaker.state is State.OPEN
    assert not breaker.probe_due(2.5), "each failed trial doubles the pause"
    assert breaker.probe_due(3.0)
    assert breaker.open_for(9.0) == 9.0, "counted from the first failure"
    breaker.probed(3.0, healthy=True)
    breaker.answered()
    assert breaker.closed
    assert breaker.open_for(9.0) == 0.0


def test_a_deadline_follows_the_slowest_rates_seen() -> None:
    pace = Pace(PaceConfig(row_timeout_s=500, base_s=10, factor=3))
    assert pace.deadline_s(1000) == 500
    for _ in range(95):
        pace.answered(1000, 10.0)
    for _ in range(10):
        pace.answered(1000, 50.0)
    assert pace.deadline_s(1000) == pytest.approx(10 + 3 * 50)
    assert pace.deadline_s(100_000) == 500, "never above the fixed limit"


def test_a_server_stands_still_when_neither_tokens_nor_answers_move() -> None:
    dog = Watchdog(PaceConfig(stall_s=60))
    dog.began(0.0)
    assert not dog.stalled(1000.0, 1), "without a counter a long answer looks the same"
    dog.tokens(0.0, 5)
    dog.tokens(50.0, 6)
    assert not dog.stalled(100.0, 1), "slow is alive"
    dog.tokens(100.0, 6)
    assert dog.stalled(111.0, 1)
    assert not dog.stalled(111.0, 0), "idle is alive"
    dog.moved(111.0)
    assert not dog.stalled(150.0, 1)


def test_kinds_that_answer_at_length_are_learnt() -> None:
    lengths = LengthModel()
    assert not lengths.is_long("essay", 1), "nothing is known yet"
    rng = random.Random(1)
    for _ in range(100):
        lengths.observe("chat", rng.randint(50, 150))
        if rng.random() < 0.1:
            lengths.observe("essay", rng.randint(800, 1200))
    assert lengths.is_long("essay", 1)
    assert not lengths.is_long("chat", 1)
    assert lengths.is_long("chat", 9), "nine short answers in a row take long too"
    assert not lengths.is_long("unheard of", 1)


@given(st.lists(st.floats(1e-4, 3000), min_size=1), st.floats(0.01, 1))
def test_a_quantile_is_an_upper_bound_within_a_factor_of_two(xs: list[float], q: float) -> None:
    histogram = Histogram()
    for x in xs:
        histogram.observe(x)
    true = sorted(xs)[max(0, -int(-q * len(xs) // 1) - 1)]
    found = histogram.quantile(q)
    assert found is not None
    assert true <= found <= max(2 * true, 0.001) + 1e-9


METRICS = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",dp_rank="0"} 12.0
sglang:num_running_reqs{model_name="m",dp_rank="1"} 8.0
sglang:num_queue_reqs{model_name="m",dp_rank="0"} 3.0
sglang:num_queue_reqs{model_name="m",dp_rank="1"} 0.0
sglang:token_usage{model_name="m",dp_rank="0"} 0.31
sglang:token_usage{model_name="m",dp_rank="1"} 0.77
sglang:generation_tokens_total{model_name="m"} 1.23e+06
sglang:e2e_request_latency_seconds_bucket{le="0.1",model_name="m"} 0.0
"""


def test_a_servers_metrics_are_summed_over_its_ranks() -> None:
    assert load_from_metrics(METRICS) == ServerLoad(20, 3, 0.77, 1.23e6)
    assert load_from_metrics("# nothing here\n") is None


def test_server_info_tells_the_load_where_there_are_no_metrics() -> None:
    told = {"internal_states": [{"num_running_reqs": 2, "num_queue_reqs": 1}] * 2}
    assert load_from_info(told) == ServerLoad(4, 2)
    assert load_from_info({"internal_states": [{"memory": 1}]}) is None
    assert load_from_info({}) is None
