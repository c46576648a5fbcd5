"""Hold one partition's seal, journal and files against each other and against the plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from datagen.errors import CorruptFile, DatagenError, LimitReached
from datagen.store.arrow_part import SealedFile, examine_sealed, sha256_of
from datagen.store.files import LEADS_OUT, leading_out, within_limits
from datagen.store.findings import Fault, Findings, relative_to
from datagen.store.guards import NOT_FINITE, extremes, repeats
from datagen.store.journal import Kind, read_journal
from datagen.store.layout import RunLayout, part
from datagen.store.plan import Plan
from datagen.store.rejections import read_rejections
from datagen.store.responses import ResponsesReader
from datagen.store.seal import FileSummary, PartitionSummary
from datagen.store.states import ShardReader

Key = tuple[str, int]
R = TypeVar("R", ResponsesReader, ShardReader)


@dataclass(slots=True)
class _Promised:
    """What the journal promises of one data file."""

    rows: int = 0
    end: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Said:
    """What a stored response says of its sample: context length, and ids int32 [n] of all of it."""

    n_context: int
    ids: NDArray[np.int32]


class PartitionCheck:
    """Everything about one partition; collects faults instead of stopping at the first."""

    def __init__(
        self, layout: RunLayout, plan: Plan, digest: str, index: int, *, quick: bool
    ) -> None:
        self._layout, self._run_root = layout.partition(index), layout.root
        self._plan, self._digest, self._index, self._quick = plan, digest, index, quick
        self._summary: PartitionSummary | None = None
        self._responses: dict[Key, int] = {}
        self._states: dict[Key, int] = {}
        self._rejects: dict[Key, str] = {}
        self._promised: dict[str, dict[int, _Promised]] = {"responses": {}, "states": {}}
        self._said: dict[str, _Said] = {}
        self._seen: set[str] = set()
        self._findings = Findings()

    def run(self) -> Findings:
        """Check; never raises for what is wrong on disk. Raises LimitReached."""
        if self._layout.root.is_dir():
            try:
                with within_limits(self._layout.root):
                    self._check()
            except LimitReached:
                raise  # nothing is known then
            except DatagenError as e:
                self._fault(e.where or self._layout.root, None, e.what)
            except OSError as e:
                self._fault(e.filename or self._layout.root, None, e.strerror or repr(e))
        return self._findings

    def _fault(self, path: str | Path, row: int | None, what: str) -> None:
        self._findings.faults.append(Fault(relative_to(self._run_root, path), row, what))

    def _check(self) -> None:
        strangers = leading_out(self._layout.root, self._run_root)
        for path in strangers:
            self._fault(path, None, LEADS_OUT)
        if self._layout.root in strangers:
            return  # no reader follows it
        prompts = self._plan.partition(self._index)
        planned = {(p.prompt_id, turn) for p in prompts for turn in range(p.n_turns)}
        self._read_journal(planned)
        collected = self._states.keys() - self._rejects.keys()
        self._findings.counts["collected"] += len(collected)
        self._findings.rejected.update(self._rejects.values())
        if self._layout.summary.exists():
            self._findings.counts["sealed"] += 1
            missing = planned - collected - self._rejects.keys()
            if missing:
                self._fault(
                    self._layout.summary,
                    None,
                    f"sealed, but {len(missing)} samples have no outcome",
                )
            try:
                self._summary = PartitionSummary.load(self._layout.summary)
            except CorruptFile as e:
                self._fault(self._layout.summary, None, e.what)
            else:
                self._check_seal(self._summary, len(collected), len(prompts))
        for number in self._numbers("responses"):
            self._check_responses(number)
        for number in self._numbers("states"):
            self._check_shard(number)
        if not self._quick:
            for prompt_id, turn in self._states:
                if f"{prompt_id}-{turn}" not in self._seen:
                    self._fault(
                        self._layout.journal, None, f"no shard holds sample {prompt_id}-{turn}"
                    )

    def _read_journal(self, planned: set[Key]) -> None:
        """Files by sample, promises by file, and reasons by rejected sample."""
        where = self._layout.journal
        records = read_journal(where, self._digest)
        reasons = read_rejections(
            self._layout.rejected, int((records["kind"] == Kind.REJECTED).sum())
        )
        for row, record in enumerate(records):
            key, kind = (bytes(record["prompt_id"]).hex(), int(record["turn"])), record["kind"]
            sample_id = f"{key[0]}-{key[1]}"
            if key not in planned:
                self._fault(where, row, f"sample {sample_id} is not planned")
            if kind == Kind.REJECTED:
                entry = next(reasons)
                if entry.sample_id != sample_id:
                    self._fault(
                        self._layout.rejected, None, f"{entry.sample_id}, the journal: {sample_id}"
                    )
                if key in self._rejects:
                    self._fault(where, row, f"sample {sample_id} is rejected twice")
                self._rejects[key] = entry.reason
            elif kind == Kind.RETRY:
                self._rejects.pop(key, None)
            else:
                responded = kind == Kind.RESPONSE
                book = self._responses if responded else self._states
                if key in book:
                    self._fault(where, row, f"sample {sample_id} stands twice")
                book[key] = int(record["file"])
                name = "responses" if responded else "states"
                promised = self._promised[name].setdefault(book[key], _Promised())
                promised.rows += 1
                promised.end = int(record["end"])
                promised.tokens += int(record["tokens"])

    def _check_seal(self, summary: PartitionSummary, collected: int, prompts: int) -> None:
        tokens = {
            name: sum(p.tokens for p in files.values()) for name, files in self._promised.items()
        }
        for what, stated, found in (
            ("fingerprint", summary.fingerprint, self._digest),
            ("prompts", summary.prompts, prompts),
            ("collected", summary.collected, collected),
            ("rejected", summary.rejected, dict(self._findings.rejected)),
            ("tokens_generated", summary.tokens_generated, tokens["responses"]),
            ("tokens_captured", summary.tokens_captured, tokens["states"]),
        ):
            if stated != found:
                self._fault(self._layout.summary, None, f"{what}: states {stated}, found {found}")
        self._check_sha256(self._layout.journal, summary.journal_sha256)
        if summary.rejections_sha256 is not None:
            self._check_sha256(self._layout.rejected, summary.rejections_sha256)
        for file in (*summary.responses, *summary.states):
            self._check_listed(file)
        listed = {f.name for f in (*summary.responses, *summary.states)}
        for path in sorted(self._layout.root.glob("*.arrow*")):
            if path.name not in listed:
                self._fault(path, None, "a file that the seal does not list")

    def _check_listed(self, file: FileSummary) -> None:
        path = self._layout.root / file.name
        kind, _, number = file.name.removesuffix(".arrow").partition("-")
        promised = self._promised[kind].get(int(number), _Promised())
        if (file.rows, file.tokens) != (promised.rows, promised.tokens):
            self._fault(
                self._layout.summary,
                None,
                f"{file.name}: states {file.rows} rows of {file.tokens} tokens, "
                f"the journal {promised.rows} of {promised.tokens}",
            )
        found: SealedFile | None = None
        if path.exists() and path.stat().st_size != file.n_bytes:  # whatever is in it
            size = path.stat().st_size
            self._fault(path, None, f"{size} bytes, the seal states {file.n_bytes}")
            return
        if path.exists() and (file.row_ends or file.row_xxh3):
            try:
                found = examine_sealed(path)
            except CorruptFile as e:
                self._fault(path, None, e.what)
        self._check_sha256(path, file.sha256, found.sha256 if found else None)
        if found and (found.row_ends, found.row_xxh3) != (file.row_ends, file.row_xxh3):
            self._fault(self._layout.summary, None, f"{file.name}: its rows are not as stated")

    def _check_sha256(self, path: Path, sha256: str, found: str | None = None) -> None:
        """`found`: its sha256, if it was read already."""
        if not path.exists():
            self._fault(path, None, "the file is gone")
            return
        size = path.stat().st_size
        self._findings.counts["files"] += 1
        self._findings.counts["bytes"] += size
        if (found or sha256_of(path)) != sha256:
            self._fault(path, None, "its sha256 is not the recorded one")

    def _numbers(self, name: str) -> list[int]:
        return sorted({*self._layout.numbers(name), *self._promised[name]})

    def _open(self, reader: type[R], name: str, path: Path, number: int) -> R | None:
        """A data file, or the journaled part of one that is still open; None if it has a fault."""
        promised = self._promised[name].get(number, _Promised())
        try:
            if path.exists():
                opened = reader(path)
            elif promised.rows:
                opened = reader(part(path), end=promised.end)
            else:
                return None  # an open file with nothing promised yet
        except CorruptFile as e:
            self._fault(e.where or path, None, e.what)
            return None
        torn = not path.exists() and len(opened) > promised.rows  # the journal's last sync was cut
        if len(opened) != promised.rows and not torn:
            self._fault(path, None, f"{len(opened)} rows, the journal has {promised.rows}")
        return opened

    def _check_responses(self, number: int) -> None:
        path = self._layout.responses(number)
        opened = self._open(ResponsesReader, "responses", path, number)
        tokens = 0
        promised = self._promised["responses"].get(number, _Promised())
        for row in range(min(len(opened), promised.rows) if opened else 0):
            assert opened is not None
            try:
                response = opened[row]
            except CorruptFile as e:
                self._fault(path, None, e.what)
                continue
            tokens += len(response.response_ids)
            sample_id = response.sample_id
            if self._responses.get((response.prompt_id, response.turn)) != number:
                self._fault(path, row, f"sample {sample_id} is not journaled here")
            if sample_id in self._said:
                self._fault(path, row, f"sample {sample_id} stands twice")
            if not len(response.context_ids) or not len(response.response_ids):
                self._fault(path, row, "empty context or response")
            self._said[sample_id] = _Said(
                len(response.context_ids),
                np.concatenate([response.context_ids, response.response_ids]),
            )
        self._check_tokens("responses", path, number, tokens)

    def _check_tokens(self, name: str, path: Path, number: int, tokens: int) -> None:
        promised = self._promised[name].get(number, _Promised())
        if tokens != promised.tokens:
            self._fault(path, None, f"{tokens} tokens, the journal has {promised.tokens}")

    def _check_shard(self, number: int) -> None:
        path = self._layout.states(number)
        shard = self._open(ShardReader, "states", path, number)
        if shard is None or self._quick:
            return
        self._findings.specs.add(shard.spec)
        if shard.spec.dtype not in NOT_FINITE:
            self._fault(path, None, f"states of unknown dtype {shard.spec.dtype}")
            return
        tokens = 0
        for row in range(len(shard)):
            try:
                tokens += self._check_sample(shard, path, row, number)
            except CorruptFile as e:
                self._fault(path, None, e.what)
        self._check_tokens("states", path, number, tokens)

    def _check_sample(self, shard: ShardReader, path: Path, row: int, number: int) -> int:
        """Check one sample; returns its tokens."""
        columns = shard.columns(row)
        sample_id, n_tokens, mask = columns.sample_id, columns.n_tokens, columns.loss_mask
        prompt_id, _, turn = sample_id.rpartition("-")
        if prompt_id != columns.prompt_id or not (turn.isascii() and turn.isdecimal()):
            self._fault(path, row, f"sample {sample_id} is not of prompt {columns.prompt_id}")
        elif self._states.get((prompt_id, int(turn))) != number:
            self._fault(path, row, f"sample {sample_id} is not journaled in this shard")
        if sample_id in self._seen:
            self._fault(path, row, f"sample {sample_id} stands twice")
        self._seen.add(sample_id)
        if not len(columns.input_ids) == len(mask) == n_tokens:
            self._fault(
                path, row, f"{len(columns.input_ids)} ids, {len(mask)} of mask, {n_tokens} tokens"
            )
            return n_tokens
        said = self._said.get(sample_id)
        if said is None or not np.array_equal(said.ids, columns.input_ids):
            self._fault(path, row, "its ids are not context + response as generated")
        elif not np.array_equal(mask, np.arange(n_tokens) >= said.n_context):
            self._fault(path, row, "its mask is not 0 over the context and 1 over the response")
        elif not mask.any():
            self._fault(path, row, "no token is supervised")
        self._check_values(shard, path, row)
        self._findings.counts["tokens"] += n_tokens
        self._findings.counts["supervised"] += int(mask.sum())
        return n_tokens

    def _check_values(self, shard: ShardReader, path: Path, row: int) -> None:
        states_TLH, limit = shard.states(row), NOT_FINITE[shard.spec.dtype]
        highest_TL, _ = extremes(states_TLH)
        for layer, high_T in enumerate(highest_TL.T):
            if (high_T >= limit).any():
                self._fault(path, row, f"layer {layer} holds NaN or infinity")
            elif not high_T.any():
                self._fault(path, row, f"layer {layer} is all zero")
            elif repeats(states_TLH[:, layer], high_T):
                self._fault(path, row, f"layer {layer} is the same for every token")
