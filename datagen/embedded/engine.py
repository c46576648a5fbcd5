"""Continuous batching: one thread reads what waits and decodes what runs, step by step.

A step is at most one pack of prompt pieces and one decode of everything running, so a long prompt or
a long queue never starves the running requests, and a finished one makes room at once. Captures are
prompts of which every state is kept; they need no place in the running batch, so they pass requests
that wait for one. In float32 a request's tokens do not depend on its neighbours: prompts are read one
at a time, cut at fixed places, and decode keeps the batch shape fixed.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import Tokenizer

from datagen.embedded.cache import SequenceCache
from datagen.embedded.capture import SpoolWriter
from datagen.embedded.model import Llama
from datagen.embedded.requests import Request
from datagen.embedded.sampling import next_tokens, scored

PIECE_TOKENS = 512  # per step: larger packs gain nothing on a CPU and stall running requests
CACHE_TOKENS = 65536  # of all running requests, at their longest: 3 GB for the shipped model
SHUTTING_DOWN = {"type": "abort", "message": "The server is shutting down."}


@dataclass(slots=True, eq=False)
class Job:
    """A request, how far its prompt is read, and what was captured of it."""

    request: Request
    done: Callable[[Request], None]
    cache: SequenceCache | None = None
    n_read: int = 0  # prompt tokens prefilled so far
    rows: list[torch.Tensor] = field(default_factory=list)  # captured so far, a piece each

    @property
    def n_next(self) -> int:
        """Size of the next piece of the prompt."""
        return min(len(self.request.input_ids) - self.n_read, PIECE_TOKENS)

    @property
    def most_tokens(self) -> int:
        """Context and response at their longest."""
        return len(self.request.input_ids) + self.request.params.max_new_tokens


class Engine:
    """Owns the model; `submit` from any thread, `done` is called from the engine's thread."""

    def __init__(
        self,
        model: Llama,
        tokenizer: Tokenizer,
        *,
        max_running: int,
        context_length: int,
        spool: SpoolWriter | None,
        on_death: Callable[[BaseException], None],
    ) -> None:
        self.model, self.tokenizer, self.spool = model, tokenizer, spool
        self.max_running, self.context_length = max_running, context_length
        self._exact = model.dtype == torch.float32
        self._inbox: queue.SimpleQueue[Job | str | None] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._reading: list[Job] = []  # prompts cut in pieces, of which some are read
        self._running: list[Job] = []
        self._ending = False
        self._on_death = on_death
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def submit(self, request: Request, done: Callable[[Request], None]) -> None:
        """Queue a request; `done` gets it back finished."""
        job = Job(request, done)
        if self._ending:
            self._finish(job, SHUTTING_DOWN)
        else:
            self._inbox.put(job)

    def abort(self, rid: str) -> None:
        """Drop a request, wherever it is; an empty `rid` drops all."""
        self._inbox.put(rid)

    def stop(self) -> None:
        """End after the current step; unfinished and later requests are aborted."""
        self._inbox.put(None)
        self._thread.join()

    @property
    def load(self) -> tuple[int, int]:
        """Requests running, requests queued."""
        return len(self._running), len(self._waiting) + len(self._reading)

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as e:  # noqa: BLE001 - as in SGLang, a broken scheduler ends the server
            self._on_death(e)

    def _serve(self) -> None:
        while not self._ending:
            self._receive(block=not (self._waiting or self._reading or self._running))
            if pack := self._next_pack():
                self._prefill(pack)
            if self._running:
                self._decode()
        self._receive(block=False)
        for job in [*self._running, *self._reading, *self._waiting]:
            self._finish(job, SHUTTING_DOWN)

    def _receive(self, *, block: bool) -> None:
        while True:
            try:
                message = self._inbox.get(block=block)
            except queue.Empty:
                return
            block = False
            if message is None:
                self._ending = True
                return
            if isinstance(message, str):
                self._drop(message)
            else:
                self._waiting.append(message)

    def _drop(self, rid: str) -> None:
        def named(jobs: Iterable[Job]) -> list[Job]:
            return [j for j in jobs if not rid or j.request.rid == rid]

        for queue_, name in ((self._waiting, "waiting queue"), (self._reading, "prefill"),
                             (self._running, "running batch")):  # fmt: skip
            for job in named(queue_):
                queue_.remove(job)
                self._finish(job, {"type": "abort", "message": f"Abort in {name}"})

    def _next_pack(self) -> list[Job]:
        """Whose next piece to read now: started prompts first, then the queue, up to a budget."""
        pack = list(self._reading)
        room = PIECE_TOKENS - sum(j.n_next for j in pack)
        held = [*self._running, *(j for j in self._reading if not j.request.capture)]
        n_held, tokens_held = len(held), sum(j.most_tokens for j in held)
        full = False
        for job in list(self._waiting):
            if pack and (self._exact or job.n_next > room):
                break
            if not job.request.capture:
                full = full or (
                    n_held >= self.max_running
                    or (n_held > 0 and tokens_held + job.most_tokens > CACHE_TOKENS)
                )
                if full:
                    continue
                n_held, tokens_held = n_held + 1, tokens_held + job.most_tokens
            self._waiting.remove(job)
            pack.append(job)
            room -= job.n_next
        return pack

    def _prefill(self, pack: list[Job]) -> None:
        pieces = []
        for job in pack:
            piece = job.request.input_ids[job.n_read : job.n_read + job.n_next]
            if job.cache is None and (
                not job.request.capture or len(piece) < len(job.request.input_ids)
            ):
                job.cache = SequenceCache(self.model.config, len(job.request.input_ids) + 1)
            pieces.append(piece)
        keeps_rows = any(j.request.capture for j in pack)
        out = self.model.prefill(
            pieces,
            caches=[j.cache for j in pack],
            boundaries=self.spool.boundaries if keeps_rows and self.spool else None,
        )
        start = 0
        for job, piece in zip(pack, pieces, strict=True):
            if job.request.capture and out.rows_NW is not None:
                job.rows.append(out.rows_NW[start : start + len(piece)])
            start += len(piece)
            job.n_read += len(piece)
        ended = [i for i, j in enumerate(pack) if j.n_read == len(j.request.input_ids)]
        self._reading = [j for j in pack if j.n_read < len(j.request.input_ids)]
        if not ended:
            return
        captures = [pack[i] for i in ended if pack[i].request.capture]
        for job in captures:
            self._publish(job)
        begun = [pack[i] for i in ended]
        self._running += [j for j in begun if not j.request.capture]
        self._extend(begun, self.model.logits(out.last_BH[ended]))

    def _publish(self, job: Job) -> None:
        request = job.request
        rows_TW = job.rows[0] if len(job.rows) == 1 else torch.cat(job.rows)
        if request.states_in_answer:
            request.states = rows_TW.to(torch.bfloat16).tolist()  # the spool's precision
            return
        if self.spool is None or request.params.max_new_tokens != 1:
            request.capture_note = {"error": "ValueError: capture needs max_new_tokens: 1"}
            return
        request.capture_note = self.spool.publish(request.rid, request.input_ids, rows_TW)

    def _decode(self) -> None:
        caches = [j.cache for j in self._running if j.cache is not None]
        last = [j.request.output_ids[-1] for j in self._running]
        pad_to = self.max_running if self._exact else 0
        self._extend(list(self._running), self.model.decode(last, caches, pad_to=pad_to))

    def _extend(self, jobs: list[Job], logits_BV: torch.Tensor) -> None:
        """Give each its next token; the finished ones leave."""
        tokens = next_tokens(
            logits_BV,
            [j.request.params for j in jobs],
            [len(j.request.output_ids) for j in jobs],
        )
        left: set[int] = set()
        for row, (job, token) in enumerate(zip(jobs, tokens, strict=True)):
            if job.request.params.max_new_tokens > 0:
                job.request.output_ids.append(token)
                if (top := job.request.top_logprobs) is not None:
                    job.request.output_logprobs.append(
                        scored(logits_BV[row], job.request.params, token, top)
                    )
            reason = self._reason(job.request, token)
            if reason is None and job.request.capture:
                reason = {"type": "length", "length": len(job.request.output_ids)}
            if reason is not None:
                left.add(id(job))
                self._finish(job, reason)
        self._running = [j for j in self._running if id(j) not in left]

    def _reason(self, request: Request, token: int) -> dict[str, Any] | None:
        p, n = request.params, len(request.output_ids)
        if n and token in p.stop_token_ids:
            return {"type": "stop", "matched": token}
        if n and not p.ignore_eos and token in self.model.config.eos_token_ids:
            return {"type": "stop", "matched": token}
        for stop in p.stop:
            if stop in self.tokenizer.decode(request.output_ids[-len(stop) - 8 :]):
                return {"type": "stop", "matched": stop}
        if n >= p.max_new_tokens or len(request.input_ids) + n >= self.context_length:
            return {"type": "length", "length": n}
        return None

    def _finish(self, job: Job, reason: dict[str, Any]) -> None:
        job.request.finish = reason
        job.done(job.request)
