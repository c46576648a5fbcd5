"""The embedded target's arithmetic against Hugging Face's, and its batching against itself."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from datagen.capture.spool import read_spool
from datagen.embedded.cache import SequenceCache
from datagen.embedded.capture import SpoolWriter
from datagen.embedded.engine import Engine
from datagen.embedded.model import Llama
from datagen.embedded.requests import Request
from datagen.embedded.sampling import SamplingParams, next_tokens, uniform
from datagen.embedded.weights import ensure_checkpoint
from tests.tiny import BOUNDARIES, HIDDEN, VOCAB, write_tiny_checkpoint

TEXTS = [
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\nParis.<|im_end|>\n",
    "The sea covers most of the planet, and its depths are colder and darker than most people think. "
    * 6,
    "def fibonacci(n: int) -> int:\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n"
    * 3,
    "Der Fluss ist lang, und das Tal ist weit. Die Leute am Ufer fischen noch am Abend.",
]
LONG = (
    "Once upon a time there was a village at the foot of a hill where nobody ever counted the days. "
    * 90
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny-llama", context=8192)


def random_ids(n: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, VOCAB, (n,), generator=generator).tolist()
    return ids


def reference(model: LlamaForCausalLM, ids: list[int], boundaries: tuple[int, ...]) -> torch.Tensor:
    """float32 [T, K+1, H]: hidden_states at the boundaries, then the post-norm last."""
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.stack([*(states[b][0] for b in boundaries), states[-1][0]], dim=1).float()


def test_prefill_matches_hugging_face_packed_or_alone(checkpoint: Path) -> None:
    ours = Llama.load(checkpoint, "float32")
    theirs = AutoModelForCausalLM.from_pretrained(str(checkpoint), dtype=torch.float32)
    sequences = [random_ids(n, n) for n in (1, 7, 60)]
    packed = ours.prefill(sequences, boundaries=BOUNDARIES).rows_NW
    assert packed is not None
    start = 0
    for ids in sequences:
        rows = packed[start : start + len(ids)].view(len(ids), -1, HIDDEN)
        torch.testing.assert_close(rows, reference(theirs, ids, BOUNDARIES), rtol=1e-4, atol=1e-3)
        start += len(ids)


def test_decode_continues_where_prefill_ended(checkpoint: Path) -> None:
    model = Llama.load(checkpoint, "float32")
    ids = random_ids(30, 1)
    whole = model.logits(model.prefill([ids]).last_BH)
    cache = SequenceCache(model.config)
    model.prefill([ids[:20]], caches=[cache])
    for token in ids[20:]:
        stepped = model.decode([token], [cache])
    torch.testing.assert_close(stepped, whole, rtol=1e-4, atol=1e-3)


@pytest.fixture
def engine(checkpoint: Path, tmp_path: Path) -> Iterator[Engine]:
    model = Llama.load(checkpoint, "float32")
    spool = SpoolWriter(tmp_path / "spool", boundaries=BOUNDARIES, hidden=HIDDEN, server="test 1")
    deaths: list[BaseException] = []
    engine = Engine(
        model,
        Tokenizer.from_file(str(checkpoint / "tokenizer.json")),
        max_running=8,
        context_length=model.config.context_length,
        spool=spool,
        on_death=deaths.append,
    )
    engine.start()
    yield engine
    engine.stop()
    spool.close()
    assert not deaths


def answer_all(engine: Engine, requests: list[Request]) -> dict[str, Request]:
    done: queue.SimpleQueue[Request] = queue.SimpleQueue()
    for request in requests:
        engine.submit(request, done.put)
    return {r.rid: r for r in (done.get(timeout=120) for _ in requests)}


ENDLESS = 7000  # tokens: seconds of work, and eight of them and one fit the engine's cache


def request(rid: str, ids: list[int], **params: object) -> Request:
    sampling = SamplingParams(**{"temperature": 0.0, "max_new_tokens": 24, **params})  # type: ignore[arg-type]
    return Request(rid, ids, sampling, False, False, 0.0)


def test_in_float32_a_requests_tokens_do_not_depend_on_its_neighbours(engine: Engine) -> None:
    prompts = {f"r{i}": random_ids(5 + 3 * i, i) for i in range(20)}
    alone = {
        rid: answer_all(engine, [request(rid, ids, temperature=0.8, sampling_seed=3)])[
            rid
        ].output_ids
        for rid, ids in prompts.items()
    }
    together = answer_all(
        engine, [request(r, ids, temperature=0.8, sampling_seed=3) for r, ids in prompts.items()]
    )
    assert {rid: r.output_ids for rid, r in together.items()} == alone
    assert len({tuple(ids) for ids in alone.values()}) > 10


def test_a_stop_token_ends_an_answer_and_is_part_of_it(engine: Engine) -> None:
    free = answer_all(engine, [request("a", random_ids(9, 5), ignore_eos=True)])["a"]
    stop = free.output_ids[3]
    stopped = answer_all(
        engine, [request("b", random_ids(9, 5), ignore_eos=True, stop_token_ids=frozenset({stop}))]
    )["b"]
    assert stopped.output_ids == free.output_ids[: free.output_ids.index(stop) + 1]
    assert stopped.finish == {"type": "stop", "matched": stop}
    assert free.finish == {"type": "length", "length": 24}


def test_an_aborted_request_comes_back_and_the_others_go_on(engine: Engine) -> None:
    done: queue.SimpleQueue[Request] = queue.SimpleQueue()
    endless = request("endless", random_ids(4, 1), max_new_tokens=ENDLESS, ignore_eos=True)
    engine.submit(endless, done.put)
    engine.submit(request("short", random_ids(4, 2)), done.put)
    assert done.get(timeout=120).rid == "short"
    engine.abort("endless")
    aborted = done.get(timeout=120)
    assert aborted.finish is not None
    assert (aborted.rid, aborted.finish["type"]) == ("endless", "abort")


def test_a_capture_holds_what_was_prefilled(engine: Engine, tmp_path: Path) -> None:
    ids = random_ids(33, 8)
    asked = Request("cap", ids, SamplingParams(max_new_tokens=1, temperature=0.0), True, False, 0.0)
    note = answer_all(engine, [asked])["cap"].capture_note
    assert note is not None
    assert engine.spool is not None
    engine.spool.close()
    spooled = read_spool(Path(note["path"]))
    assert spooled.input_ids == tuple(ids)
    assert spooled.boundaries == BOUNDARIES
    rows = engine.model.prefill([ids], boundaries=BOUNDARIES).rows_NW
    assert rows is not None
    assert bytes(spooled.rows) == rows.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()


def test_a_seeded_draw_follows_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -30.0]])
    drawn = [
        next_tokens(logits, [SamplingParams(temperature=1.0, sampling_seed=s)], [0])[0]
        for s in range(4000)
    ]
    shares = np.bincount(drawn, minlength=4) / len(drawn)
    np.testing.assert_allclose(shares, torch.softmax(logits[0], -1).numpy(), atol=0.03)


def test_top_p_and_top_k_cut_the_tail() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    for params, allowed in (({"top_k": 2}, {2, 3}), ({"top_p": 0.5}, {3})):
        drawn = {
            next_tokens(logits, [SamplingParams(temperature=1.0, sampling_seed=s, **params)], [0])[
                0
            ]
            for s in range(300)
        }
        assert drawn == allowed


def test_uniform_numbers_are_uniform_and_repeat() -> None:
    numbers = [uniform(7, i) for i in range(5000)]
    assert numbers == [uniform(7, i) for i in range(5000)]
    assert abs(float(np.mean(numbers)) - 0.5) < 0.02


# -- the real weights ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return ensure_checkpoint()


@pytest.mark.model
@pytest.mark.parametrize(("dtype", "least_cosine"), [("float32", 0.99999), ("bfloat16", 0.999)])
def test_captured_states_are_those_of_hugging_face(
    smollm2: Path, dtype: str, least_cosine: float
) -> None:
    boundaries = (2, 15, 27)
    ours = Llama.load(smollm2, dtype)
    theirs = AutoModelForCausalLM.from_pretrained(str(smollm2), dtype=getattr(torch, dtype))
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    batch = [tokenizer.encode(t).ids for t in TEXTS]
    packs = [batch]
    if (
        dtype == "float32"
    ):  # benchmarks/embedded.py does long ones in bf16: Hugging Face takes a minute
        packs = [[ids] for ids in (*batch, tokenizer.encode(LONG).ids)]
        assert len(packs[-1][0]) > 1500
    cosines: list[torch.Tensor] = []
    within: list[torch.Tensor] = []
    for pack in packs:
        rows = ours.prefill(pack, boundaries=boundaries).rows_NW
        assert rows is not None
        got = rows.to(torch.bfloat16).view(len(rows), 4, -1)
        want = torch.cat([reference(theirs, ids, boundaries) for ids in pack]).to(torch.bfloat16)
        cosines.append(torch.cosine_similarity(got.float(), want.float(), dim=-1))
        steps = ordered(got) - ordered(want)
        within.append((steps.abs() <= 1).flatten())
    mean_per_layer = torch.cat(cosines).mean(0)
    assert (mean_per_layer >= least_cosine).all(), mean_per_layer
    if dtype == "float32":
        assert torch.cat(within).float().mean() >= 0.999


def ordered(x: torch.Tensor) -> torch.Tensor:
    """bf16 values as integers in which neighbours differ by one."""
    bits = x.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


@pytest.mark.model
@pytest.mark.parametrize(("dtype", "share"), [("float32", 0.995), ("bfloat16", 0.975)])
def test_the_final_state_predicts_the_next_greedy_token(
    smollm2: Path, tmp_path: Path, dtype: str, share: float
) -> None:
    model = Llama.load(smollm2, dtype)
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    engine = Engine(
        model, tokenizer, max_running=8, context_length=2048, spool=None,
        on_death=lambda e: pytest.fail(repr(e)),
    )  # fmt: skip
    engine.start()
    template = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    questions = ["Why is the sky blue?", "Count to ten.", "Name three rivers.", "Write a haiku."]
    asked = {q: tokenizer.encode(template.format(q)).ids for q in questions}
    said = answer_all(engine, [request(q, ids, max_new_tokens=48) for q, ids in asked.items()])
    engine.stop()
    hits = total = 0
    for question, context in asked.items():
        response = said[question].output_ids
        rows = model.prefill([context + response], boundaries=(2,)).rows_NW
        assert rows is not None
        final = rows[len(context) - 1 : -1, -model.config.hidden_size :].to(torch.bfloat16)
        logits = model.logits(final)
        for position, token in enumerate(response):
            total += 1
            hits += int(logits[position].argmax()) == token
            if int(logits[position].argmax()) != token:
                top = logits[position].topk(2).values
                print(f"{question} position {position}: top-2 gap {float(top[0] - top[1]):.4f}")
    assert hits >= share * total, f"{hits} of {total}"
