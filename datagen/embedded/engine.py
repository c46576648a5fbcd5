"""Continuous batching: one thread prefills what waits and decodes what runs, step by step.

A step is at most one packed prefill and one decode of everything running, so a long queue of new
requests never starves the running ones, and a finished one makes room at once. In float32 a
request's tokens do not depend on its neighbours: prefill takes one sequence at a time and decode
keeps the batch shape fixed.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer

from datagen.embedded.capture import SpoolWriter
from datagen.embedded.model import KVCache, Llama
from datagen.embedded.requests import Request
from datagen.embedded.sampling import next_tokens

PREFILL_TOKENS = 1024  # per step: larger packs gain nothing on a CPU and stall running requests
CACHE_TOKENS = 65536  # slots x capacity: 3 GB for the shipped model


@dataclass(slots=True)
class _Job:
    request: Request
    done: Callable[[Request], None]


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
        self._cache = KVCache(model.config, max_running)
        self._inbox: queue.SimpleQueue[_Job | str | None] = queue.SimpleQueue()
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._ending = False
        self._on_death = on_death
        self.tokens_generated = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def submit(self, request: Request, done: Callable[[Request], None]) -> None:
        """Queue a request; `done` gets it back finished."""
        self._inbox.put(_Job(request, done))

    def abort(self, rid: str) -> None:
        """Drop a request, wherever it is; an empty `rid` drops all."""
        self._inbox.put(rid)

    def stop(self) -> None:
        """End after the current step; unfinished requests are aborted."""
        self._inbox.put(None)
        self._thread.join()

    @property
    def load(self) -> tuple[int, int]:
        """Requests running, requests queued."""
        return len(self._running), len(self._waiting)

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as e:  # noqa: BLE001 - as in SGLang, a broken scheduler ends the server
            self._on_death(e)

    def _serve(self) -> None:
        while not self._ending:
            self._receive(block=not self._waiting and not self._running)
            captures, admitted = self._admit()
            if captures:
                self._prefill_captures(captures)
            if admitted:
                self._prefill(admitted)
            if self._running:
                self._decode()
        for job in [*self._running, *self._waiting]:
            self._finish(job, {"type": "abort", "message": "The server is shutting down."})

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
        aborted = {"type": "abort", "message": "Abort in waiting queue"}
        for job in [j for j in self._waiting if not rid or j.request.rid == rid]:
            self._waiting.remove(job)
            self._finish(job, aborted)
        for slot in reversed(range(len(self._running))):
            if not rid or self._running[slot].request.rid == rid:
                self._leave(slot, {"type": "abort", "message": "Abort in running batch"})

    def _admit(self) -> tuple[list[_Job], list[_Job]]:
        """The next prefill: captures and new requests from the head of the queue, up to a budget."""
        captures: list[_Job] = []
        admitted: list[_Job] = []
        tokens = 0
        while self._waiting:
            job = self._waiting[0]
            size = len(job.request.input_ids)
            if tokens and (self._exact or tokens + size > PREFILL_TOKENS):
                break
            if not job.request.capture and not self._fits(job.request, admitted):
                break
            self._waiting.popleft()
            (captures if job.request.capture else admitted).append(job)
            tokens += size
        return captures, admitted

    def _fits(self, request: Request, admitted: list[_Job]) -> bool:
        count = len(self._running) + len(admitted) + 1
        if count > self.max_running:
            return False
        sizes = [
            len(j.request.input_ids) + j.request.params.max_new_tokens
            for j in [*self._running, *admitted]
        ]
        mine = min(len(request.input_ids) + request.params.max_new_tokens, self.context_length)
        return count == 1 or self.max_running * max([mine, *sizes]) <= CACHE_TOKENS

    def _prefill_captures(self, jobs: list[_Job]) -> None:
        assert self.spool is not None
        sequences = [j.request.input_ids for j in jobs]
        out = self.model.prefill(sequences, boundaries=self.spool.boundaries)
        assert out.rows_NW is not None
        tokens = self.model.logits(out.last_BH).argmax(-1).tolist()
        start = 0
        for job, token in zip(jobs, tokens, strict=True):
            request, size = job.request, len(job.request.input_ids)
            if request.params.max_new_tokens == 1:
                request.capture_note = self.spool.publish(
                    request.rid, request.input_ids, out.rows_NW[start : start + size]
                )
            else:
                request.capture_note = {"error": "ValueError: capture needs max_new_tokens: 1"}
            start += size
            request.output_ids.append(token)
            self._finish(job, {"type": "length", "length": 1})

    def _prefill(self, jobs: list[_Job]) -> None:
        slots = [self._cache.add(len(j.request.input_ids)) for j in jobs]
        out = self.model.prefill(
            [j.request.input_ids for j in jobs], cache=self._cache, slots=slots
        )
        self._running += jobs
        self._extend(slots, self.model.logits(out.last_BH))

    def _decode(self) -> None:
        last = [j.request.output_ids[-1] for j in self._running]
        logits = self.model.decode(last, self._cache, pad_to=self.max_running if self._exact else 0)
        self._extend(list(range(len(self._running))), logits)

    def _extend(self, slots: list[int], logits_BV: torch.Tensor) -> None:
        """Give each slot its next token; the finished ones leave."""
        requests = [self._running[s].request for s in slots]
        tokens = next_tokens(
            logits_BV, [r.params for r in requests], [len(r.output_ids) for r in requests]
        )
        finished: list[tuple[int, dict[str, Any]]] = []
        for slot, request, token in zip(slots, requests, tokens, strict=True):
            if request.params.max_new_tokens > 0:
                request.output_ids.append(token)
                self.tokens_generated += 1
            reason = self._reason(request, token)
            if reason is not None:
                finished.append((slot, reason))
        for slot, reason in reversed(finished):
            self._leave(slot, reason)

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

    def _leave(self, slot: int, reason: dict[str, Any]) -> None:
        """Take a request out of the batch; the last one moves into its slot, as in the cache."""
        job = self._running[slot]
        last = self._running.pop()
        if slot < len(self._running):
            self._running[slot] = last
        self._cache.remove(slot)
        self._finish(job, reason)

    def _finish(self, job: _Job, reason: dict[str, Any]) -> None:
        job.request.finish = reason
        job.done(job.request)
