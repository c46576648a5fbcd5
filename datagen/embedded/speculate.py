"""EAGLE-3 chain speculation: what the engine's drafter knows of each running sequence, and what it drafts.

A cycle of a sequence of which the target has read L tokens, the next one (the bonus) being known:
    draft    K tokens: one from the state of row L-1, then K-1 steps on the drafter's own states
    verify   the target reads the bonus and the drafts in one pass; the leading drafts that equal its
             own choice are accepted, and its choice after them is the next bonus
    read     the drafter reads rows L..L+a with the *target's* boundaries: whatever drafting left in its
             cache is overwritten
Rows behind the accepted ones, which a GPU engine computes and ignores, are not computed. The target's
choice at a position depends on logits, seed and position alone, so the output is that of plain decoding.

The drafter is fed boundaries rounded to bf16, as a bf16 engine's are and as shards store them, and
computes in float32: replay from shards sees the same numbers.

Shape suffixes: T rows, B sequences, S slots of a cache, Q query heads, J key heads, D head size,
H hidden, W boundaries x H, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from datagen.drafter.checkpoint import load_drafter
from datagen.drafter.model import Drafter
from datagen.embedded.model import Llama
from datagen.errors import ConfigError

GROWTH = 256  # slots by which a cache grows
MOST_STEPS = 16


@dataclass(slots=True)
class SpecCounts:
    """A request's verify steps, counted as SGLang counts them. `steps`: (L, accepted, emitted).

    Accepted drafts are counted before the output is cut at a stop token or a limit.
    """

    draft_steps: int
    steps: list[tuple[int, int, int]] = field(default_factory=list)

    def meta_info(self, completion_tokens: int) -> dict[str, Any]:
        """SGLang's fields; none where no verify step ran."""
        verify_ct = len(self.steps)
        if not verify_ct:
            return {}
        accepted = [a for _, a, _ in self.steps]
        proposed = verify_ct * self.draft_steps
        histogram = [accepted.count(n) for n in range(max(accepted) + 1)]
        return {
            "spec_verify_ct": verify_ct,
            "spec_num_correct_drafts": sum(accepted),
            "spec_num_proposed_drafts": proposed,
            "spec_accept_rate": sum(accepted) / proposed,
            "spec_accept_length": completion_tokens / verify_ct,
            "spec_correct_drafts_histogram": histogram,
        }


class DraftState:
    """One sequence's rows: keys and values [S, J, D] of the slots, and the last row's state [H]."""

    def __init__(self, drafter: Drafter) -> None:
        c = drafter.config
        self._shape = (c.num_kv_heads, c.head_dim)
        self.keys = torch.empty(0, *self._shape)
        self.values = torch.empty(0, *self._shape)
        self.rows = 0
        """Rows of target features held: L."""
        self.last_H: Tensor | None = None

    def write(self, slot: int, keys_TJD: Tensor, values_TJD: Tensor) -> None:
        """Fill slots from `slot` on, over whatever they held."""
        end = slot + len(keys_TJD)
        if end > len(self.keys):
            more = torch.empty(-(-end // GROWTH) * GROWTH - len(self.keys), *self._shape)
            self.keys = torch.cat([self.keys, more])
            self.values = torch.cat([self.values, more])
        self.keys[slot:end] = keys_TJD
        self.values[slot:end] = values_TJD


class Speculator:
    """A drafter beside the target. `steps` = K, SGLang's num_draft_tokens - 1."""

    def __init__(self, drafter: Drafter, embed_VH: Tensor, *, steps: int) -> None:
        if not 1 <= steps <= MOST_STEPS:
            raise ConfigError(f"draft steps must lie in 1..{MOST_STEPS}, got {steps}")
        self.steps = steps
        self._drafter = drafter.float().eval()
        self._embed_VH = embed_VH.float()

    @classmethod
    def load(
        cls, directory: Path, model: Llama, boundaries: tuple[int, ...], *, steps: int
    ) -> Speculator:
        """A checkpoint that fits the target. Raises ConfigError for another target's."""
        drafter = load_drafter(directory, target_type=model.config.model_type).drafter
        c = drafter.config
        for name, ours, theirs in (
            ("hidden size", c.hidden_size, model.config.hidden_size),
            ("vocabulary", c.vocab_size, model.config.vocab_size),
            ("boundaries", c.boundaries and list(c.boundaries), list(boundaries)),
        ):
            if ours != theirs:
                raise ConfigError(
                    f"the drafter's {name} is {ours}, the target's {theirs}", where=directory,
                    fix="serve the drafter with the target and boundaries it was trained on",
                )  # fmt: skip
        return cls(drafter, model.embedding, steps=steps)

    def begin(self) -> DraftState:
        """Of a sequence of which nothing is read."""
        return DraftState(self._drafter)

    @torch.inference_mode()
    def read(
        self,
        states: Sequence[DraftState],
        rows_TW: Sequence[Tensor],
        next_ids: Sequence[Sequence[int]],
    ) -> None:
        """Each sequence's next rows: the target's boundaries, and the token after each.

        Leaves in each state what the next draft starts from.
        """
        if not states:
            return
        drafter, layer = self._drafter, self._drafter.midlayer
        counts = [len(ids) for ids in next_ids]
        features = torch.cat([r.to(torch.bfloat16) for r in rows_TW]).float()
        h_TH = drafter.project(features)
        ids = torch.tensor([i for part in next_ids for i in part])
        positions = torch.cat(
            [torch.arange(s.rows, s.rows + n) for s, n in zip(states, counts, strict=True)]
        )
        x_T2H = layer.joined(self._embed_VH[ids], h_TH)
        angles = drafter.angles(positions)
        k_TJD, v_TJD = layer.self_attn.keys_values(x_T2H, angles)
        ends = torch.tensor(counts).cumsum(0) - 1  # only the last row of each is drafted from
        q_BQD = layer.self_attn.queries(x_T2H[ends], (angles[0][ends], angles[1][ends]))
        parts = zip(torch.split(k_TJD, counts), torch.split(v_TJD, counts), strict=True)
        for state, (k, v) in zip(states, parts, strict=True):
            state.write(state.rows, k, v)
            state.rows += len(k)
        attended = self._attend(q_BQD, states, [s.rows for s in states])
        for state, h_H in zip(states, layer.finished(h_TH[ends], attended), strict=True):
            state.last_H = h_H

    @torch.inference_mode()
    def draft(self, states: Sequence[DraftState]) -> list[list[int]]:
        """K tokens for each sequence, in target ids."""
        layer = self._drafter.midlayer
        h_BH = torch.stack([s.last_H for s in states if s.last_H is not None])
        assert len(h_BH) == len(states), "a sequence drafts before its prompt is read"
        drafts_B = self._tokens(h_BH)
        said = [drafts_B]
        lengths = torch.tensor([s.rows for s in states])
        for k in range(self.steps - 1):
            if self._drafter.config.norm_output:
                h_BH = self._drafter.norm(h_BH)
            angles = self._drafter.angles(lengths + k)
            x_B2H = layer.joined(self._embed_VH[drafts_B], h_BH)
            q_BQD = layer.self_attn.queries(x_B2H, angles)
            k_BJD, v_BJD = layer.self_attn.keys_values(x_B2H, angles)
            for i, state in enumerate(states):
                state.write(state.rows + k, k_BJD[i : i + 1], v_BJD[i : i + 1])
            attended = self._attend(q_BQD, states, [s.rows + k + 1 for s in states])
            h_BH = layer.finished(h_BH, attended)
            drafts_B = self._tokens(h_BH)
            said.append(drafts_B)
        drafted: list[list[int]] = torch.stack(said, dim=1).tolist()
        return drafted

    def _tokens(self, h_BH: Tensor) -> Tensor:
        return self._drafter.target_ids(self._drafter.lm_head(self._drafter.norm(h_BH)).argmax(-1))

    def _attend(self, q_BQD: Tensor, states: Sequence[DraftState], slots: Sequence[int]) -> Tensor:
        """One query of each sequence over its first `slots` slots: [B, Q, D]."""
        outs = [
            F.scaled_dot_product_attention(
                q_QD[None, :, None],
                state.keys[:n].transpose(0, 1)[None],
                state.values[:n].transpose(0, 1)[None],
                enable_gqa=True,
            )[0, :, 0]
            for q_QD, state, n in zip(q_BQD, states, slots, strict=True)
        ]
        return torch.stack(outs)


def verified(drafts: Sequence[int], choices: Sequence[int]) -> int:
    """How many leading drafts the target chose too: choices[j] is its token after drafts[:j]."""
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == choices[accepted]:
        accepted += 1
    return accepted
