"""speculators 0.9: its Eagle3DraftModel as a step to be timed, and its trainer with stamped steps.

python -m benchmarks.finetune_peer STAMPS.json EVERY [flags of `speculators train`]
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.config import Eagle3SpeculatorConfig

from datagen.drafter.model import Drafter
from datagen.drafter.rows import Sample
from datagen.drafter.speculators import write_speculators
from datagen.drafter.target import Target
from datagen.drafter.vocab import DraftVocab


def peer_stepper(
    drafter: Drafter, target: Target, words: DraftVocab, samples: Sequence[Sample], depths: int,
    device: torch.device, dtype: torch.dtype,
) -> Callable[[], float]:  # fmt: skip
    """One forward and backward over the packed samples; on CUDA with its fused loss and flex attention,

    in autocast as its trainer does. The final states are post-norm already, so its verifier norm is
    replaced by nothing.
    """
    cuda = device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        write_speculators(
            Path(folder), drafter.config, drafter.state_dict(), embed_VH=target.embed_VH,
            target="none", dtype="float32",
        )  # fmt: skip
        config = Eagle3SpeculatorConfig.from_pretrained(folder)
        config.transformer_layer_config._attn_implementation = (
            "simple_flex_attention" if cuda else "eager"
        )
        model = Eagle3DraftModel(config)
        model.load_state_dict(load_file(f"{folder}/model.safetensors"), strict=False)
    with torch.no_grad():
        rows = target.draft_head(torch.from_numpy(words.target_ids_U).to(device))
        model.verifier_lm_head.weight.copy_(rows.float())
    model.verifier_norm = torch.nn.Identity()
    model = model.to(device).train()
    parts: dict[str, list[torch.Tensor]] = {n: [] for n in ("g", "x", "y", "m", "d", "p")}
    for number, s in enumerate(samples):
        n = len(s.ids_N)
        assert s.final_NH is not None
        mask = torch.arange(n) >= s.n_context
        mask[n - 1] = False
        values = (
            s.features_NW[:-1].to(dtype), s.ids_N[1:], s.final_NH[1:].to(dtype), mask[1:],
            torch.full((n - 1,), number), torch.arange(1, n),
        )  # fmt: skip
        for part, value in zip(parts.values(), values, strict=True):
            part.append(value)
    g, x, y, m, d, p = (torch.cat(v)[None].to(device) for v in parts.values())
    loss_config = resolve_loss_config("kl_div", "fused" if cuda else "eager")

    def one() -> float:
        model.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=cuda):
            _, loss, _ = model(
                hidden_states=g, input_ids=x, document_ids=d, loss_mask=m, position_ids=p,
                verifier_last_hidden_states=y, ttt_steps=depths, ttt_step_loss_decay=1.0,
                loss_config=loss_config,
            )  # fmt: skip
        loss.backward()
        return float(loss.detach())

    return one


def train(stamps: Path, every: int, flags: list[str]) -> None:
    """Its own `train` command; writes [step, seconds] of every `every`th step, the GPU waited for.

    Its trainer moves the model to an accelerator without asking whether there is one: on a CPU three
    of its lookups are answered for it.
    """
    from speculators.train import cli, trainer
    from speculators.train.config import TrainConfig

    marks: list[tuple[int, float]] = []
    own: Any = trainer.Trainer.train_epoch
    steps = 0

    def train_epoch(self: Any, epoch: int, **options: Any) -> None:
        nonlocal steps

        def stepped() -> None:
            if self.global_step % every == 0:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                marks.append((self.global_step, time.perf_counter()))

        own(self, epoch, step_callback=stepped, **options)
        steps = self.global_step

    trainer.Trainer.train_epoch = train_epoch
    if not torch.cuda.is_available():
        trainer.get_local_rank = lambda: "cpu"
        torch.accelerator.synchronize = lambda *_: None
        setup = trainer.Trainer.setup_trainer

        def setup_trainer(self: Any) -> None:
            self.device_type = "cpu"
            setup(self)

        trainer.Trainer.setup_trainer = setup_trainer
    cli.main(TrainConfig.resolve(flags))
    stamps.write_text(json.dumps({"steps": steps, "marks": marks}))


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
