"""Long prompts, captures and running requests, side by side in one engine."""

from __future__ import annotations

import queue
import time
from pathlib import Path

import torch

from datagen.capture.spool import read_spool
from datagen.embedded.cache import SequenceCache
from datagen.embedded.engine import PIECE_TOKENS, Engine
from datagen.embedded.model import Llama
from datagen.embedded.requests import Request
from datagen.embedded.sampling import SamplingParams
from tests.embedded.test_engine import ENDLESS, answer_all, checkpoint, engine, random_ids, request
from tests.tiny import BOUNDARIES

__all__ = ["checkpoint", "engine"]  # fixtures
LONG = PIECE_TOKENS + 300


def capture(rid: str, ids: list[int]) -> Request:
    return Request(rid, ids, SamplingParams(max_new_tokens=1, temperature=0.0), True, False, 0.0)


def rows(model: Llama, ids: list[int]) -> torch.Tensor:
    out = model.prefill([ids], boundaries=BOUNDARIES).rows_NW
    assert out is not None
    return out


def test_a_prompt_read_in_pieces_has_the_states_of_one_read_whole(checkpoint: Path) -> None:
    model = Llama.load(checkpoint, "float32")
    ids = random_ids(70, 3)
    cache = SequenceCache(model.config)
    pieces = [
        model.prefill([ids[a:b]], caches=[cache], boundaries=BOUNDARIES).rows_NW
        for a, b in ((0, 1), (1, 30), (30, 70))
    ]
    joined = torch.cat([p for p in pieces if p is not None])
    torch.testing.assert_close(joined, rows(model, ids), rtol=1e-4, atol=1e-3)


def test_a_long_capture_holds_every_row(engine: Engine) -> None:
    ids = random_ids(LONG, 4)
    note = answer_all(engine, [capture("long", ids)])["long"].capture_note
    assert note is not None
    assert engine.spool is not None
    engine.spool.close()
    spooled = read_spool(Path(note["path"]))
    assert spooled.input_ids == tuple(ids)
    got = torch.frombuffer(bytearray(spooled.rows), dtype=torch.bfloat16).view(LONG, -1)
    want = rows(engine.model, ids)
    torch.testing.assert_close(got.float(), want, rtol=2**-7, atol=2e-3)


def test_long_prompts_captures_and_aborts_change_nobodys_tokens(engine: Engine) -> None:
    prompts = {f"r{i}": random_ids(n, i) for i, n in enumerate((4, LONG, 33, PIECE_TOKENS, 7, 90))}
    alone = {r: answer_all(engine, [request(r, ids)])[r].output_ids for r, ids in prompts.items()}
    done: queue.SimpleQueue[Request] = queue.SimpleQueue()
    for i, (rid, ids) in enumerate(prompts.items()):
        engine.submit(request(f"x{i}", random_ids(LONG, 50 + i)), done.put)
        engine.submit(request(rid, ids), done.put)
        engine.submit(capture(f"c{i}", random_ids(60, 90 + i)), done.put)
        engine.abort(f"x{i}")
    answers = {r.rid: r for r in (done.get(timeout=120) for _ in range(3 * len(prompts)))}
    assert {rid: answers[rid].output_ids for rid in prompts} == alone
    for i in range(len(prompts)):
        finish = answers[f"x{i}"].finish
        assert finish is not None
        assert finish["type"] == "abort"


def test_running_requests_go_on_while_a_long_prompt_is_read(engine: Engine) -> None:
    done: queue.SimpleQueue[Request] = queue.SimpleQueue()
    running = request("running", random_ids(4, 1), max_new_tokens=ENDLESS, ignore_eos=True)
    engine.submit(running, done.put)
    while not running.output_ids:
        time.sleep(0.001)
    counts = []
    forward = engine.model.prefill

    def counted(*args: object, **kwargs: object) -> object:
        counts.append(len(running.output_ids))
        return forward(*args, **kwargs)  # type: ignore[arg-type]

    engine.model.prefill = counted  # type: ignore[assignment, method-assign]
    engine.submit(request("long", random_ids(LONG, 2), max_new_tokens=1), done.put)
    assert done.get(timeout=120).rid == "long"
    first, second = counts
    assert second == first + 1


def test_captures_pass_requests_that_wait_for_a_place(engine: Engine) -> None:
    done: queue.SimpleQueue[Request] = queue.SimpleQueue()
    for i in range(engine.max_running + 1):
        endless = request(f"endless{i}", random_ids(4, i), max_new_tokens=ENDLESS, ignore_eos=True)
        engine.submit(endless, done.put)
    engine.submit(capture("capture", random_ids(5, 1)), done.put)
    assert done.get(timeout=120).rid == "capture"
    assert engine.load == (engine.max_running, 1)
    engine.abort("")
    rest = [done.get(timeout=120).finish for _ in range(engine.max_running + 1)]
    assert {f["type"] for f in rest if f is not None} == {"abort"}
