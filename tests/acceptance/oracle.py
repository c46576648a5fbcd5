"""An engine's speculation, slot by slot and as slowly as can be: what replay must agree with.

A tiny random target in float64, and a drafter trained for a moment on what it says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from datagen.drafter.config import DrafterConfig
from datagen.drafter.model import Drafter
from datagen.drafter.rope import Rope
from datagen.drafter.rows import Sample
from tests.acceptance.briefly import trained_briefly

HIDDEN, VOCAB, DRAFT_VOCAB, BOUNDARIES = 32, 64, 52, (1, 2, 3)
TRAINED_PROMPTS = 10


def prompt_of(seed: int, n: int) -> list[int]:
    """Random ids; the drafter has seen what the target says to the first few of five tokens."""
    generator = torch.Generator().manual_seed(100 + seed)
    ids: list[int] = torch.randint(0, VOCAB, (n,), generator=generator).tolist()
    return ids


class Target:
    """Prefix in, boundaries and greedy predictions out; nothing is cached."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        config = LlamaConfig(
            hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=VOCAB, max_position_embeddings=256,
            initializer_range=0.35, tie_word_embeddings=True,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config).double().eval()
        self.embed_VH = self.model.get_input_embeddings().weight.detach()

    @torch.no_grad()
    def __call__(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """float64 boundaries [n, 3H]; logits [n, V]."""
        out = self.model(torch.tensor([ids]), output_hidden_states=True)
        return torch.cat([out.hidden_states[b][0] for b in BOUNDARIES], -1), out.logits[0]

    @torch.no_grad()
    def greedy(self, prompts: Tensor, n_tokens: int) -> Tensor:
        """int64 [B, P + n_tokens] of equally long prompts."""
        ids = prompts
        for _ in range(n_tokens):
            ids = torch.cat([ids, self.model(ids).logits[:, -1:].argmax(-1)], dim=1)
        return ids


def sample_of(target: Target, ids: list[int], n_context: int, name: str = "p-0") -> Sample:
    """A record of the target's: ids, and the boundaries of every token."""
    return Sample(name, torch.tensor(ids), n_context, target(ids)[0], None)


@cache
def trained_pair() -> tuple[Target, Drafter]:
    """The target, and a drafter that guesses it right about half of the time. float64."""
    target = Target()
    prompts = torch.tensor([prompt_of(seed, 5) for seed in range(TRAINED_PROMPTS)])
    texts = target.greedy(prompts, 40).tolist()
    samples = [sample_of(target, ids, 5, f"t{i}-0") for i, ids in enumerate(texts)]
    config = DrafterConfig(
        hidden_size=HIDDEN, intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=8,
        vocab_size=VOCAB, draft_vocab_size=DRAFT_VOCAB, rope=Rope(10_000.0), max_positions=256,
    )  # fmt: skip
    drafter = trained_briefly(config, samples, target.embed_VH, rounds=45, lr=4e-3)
    return target, drafter.double()


@dataclass
class Run:
    """What the engine did: (L, a untruncated) of every verify step, and its output."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)

    def stopped_at(self, max_new_tokens: int) -> Run:
        """The run that a smaller limit gives: a step at L begins with L - P + 1 tokens put out."""
        p = len(self.prompt)
        steps = [(length, a) for length, a in self.steps if length - p + 1 < max_new_tokens]
        return Run(self.prompt, self.output[:max_new_tokens], steps)

    @property
    def verify_ct(self) -> int:
        return len(self.steps)

    @property
    def num_correct(self) -> int:
        return sum(a for _, a in self.steps)


class SlotDrafter:
    """The engine's drafter: a cache of slots, written and read one row at a time."""

    def __init__(self, drafter: Drafter, embed_VH: Tensor) -> None:
        self.drafter, self.embed_VH = drafter, embed_VH
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def row(self, slot: int, token: int, h_H: Tensor) -> Tensor:
        """Run one row at position and slot `slot`; its state before the norm."""
        layer, c = self.drafter.midlayer, self.drafter.config
        h_1H = h_H[None]
        x = layer.joined(F.embedding(torch.tensor([token]), self.embed_VH), h_1H)
        angles = self.drafter.angles(torch.tensor([slot]))
        k, v = layer.self_attn.keys_values(x, angles)
        self.keys[slot], self.values[slot] = k[0], v[0]
        q_QD = layer.self_attn.queries(x, angles)[0]
        groups = c.num_heads // c.num_kv_heads
        k_SQD = torch.stack([self.keys[s] for s in range(slot + 1)]).repeat_interleave(groups, 1)
        v_SQD = torch.stack([self.values[s] for s in range(slot + 1)]).repeat_interleave(groups, 1)
        weights = torch.softmax((k_SQD * q_QD).sum(-1) / c.head_dim**0.5, dim=0)
        return layer.finished(h_1H, (weights[..., None] * v_SQD).sum(0)[None])[0]

    def token(self, h_H: Tensor) -> int:
        best = self.drafter.lm_head(self.drafter.norm(h_H[None])).argmax(-1)
        return int(self.drafter.target_ids(best)[0])


@cache
def free_run(seed: int, n_prompt: int, steps: int) -> Run:
    """40 tokens after prompt `seed` by the trained pair."""
    target, drafter = trained_pair()
    prompt = prompt_of(seed, n_prompt)
    return speculate(target, drafter, prompt, steps=steps, max_new_tokens=40)


@torch.no_grad()
def speculate(
    target: Target,
    drafter: Drafter,
    prompt: list[int],
    *,
    steps: int,
    max_new_tokens: int,
    stop: int | None = None,
) -> Run:
    """Section 2 of the rules, literally: prefill, draft, verify, extend, junk rows and overwrites."""
    run, slots = Run(prompt), SlotDrafter(drafter, target.embed_VH)

    def ended() -> bool:
        return len(run.output) >= max_new_tokens or (stop is not None and run.output[-1] == stop)

    boundaries, logits = target(prompt)
    bonus = int(logits[-1].argmax())
    run.output.append(bonus)
    if ended():
        return run
    features = drafter.project(boundaries)
    for slot, token in enumerate([*prompt[1:], bonus]):
        h_H = slots.row(slot, token, features[slot])
    length = len(prompt)
    while True:
        drafts, feature = [slots.token(h_H)], h_H
        for k in range(1, steps):
            feature = slots.row(length + k - 1, drafts[-1], feature)
            drafts.append(slots.token(feature))
        read = [*prompt, *run.output][: length + 1]
        boundaries, logits = target([*read, *drafts])
        predictions = logits[length:].argmax(-1).tolist()
        accepted = 0
        while accepted < steps and drafts[accepted] == predictions[accepted]:
            accepted += 1
        run.steps.append((length, accepted))
        for token in predictions[: accepted + 1]:
            run.output.append(token)
            if ended():
                return run
        features = drafter.project(boundaries[length:])
        ids = predictions[: accepted + 1] + [0] * (steps - accepted)
        states = [slots.row(length + j, ids[j], features[j]) for j in range(steps + 1)]
        h_H, length = states[accepted], length + accepted + 1
