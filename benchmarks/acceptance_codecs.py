"""Does the lossy codec cost acceptance? Two drafters, one on `plane`, one on `mantissa-4` states.

The states of a run are written again with `mantissa-4`; both runs train a fresh drafter with the same
settings, seed, order and vocabulary; both drafters are replayed on the same held-out answers with their
exact states, which is what a server feeds a drafter however it was trained. The difference is paired by
prompt, with its interval.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from datagen.acceptance.metrics import accept_len, compare
from datagen.acceptance.replay import Replay
from datagen.drafter.checkpoint import load_drafter
from datagen.drafter.target import load_target
from datagen.embedded.weights import ensure_checkpoint
from datagen.finetune import finetune, finetune_config
from datagen.store.codecs import codec_named
from datagen.store.fingerprint import Fingerprint
from datagen.store.layout import RunLayout
from datagen.store.manifest import Manifest, ManifestHeader, build_manifest
from datagen.store.partition import PartitionStore
from datagen.store.plan import Plan
from datagen.store.responses import ResponsesReader
from datagen.store.run_reader import RunReader
from datagen.store.states import StatesSpec

PAIR = ("plane", "mantissa-4")


def compared(args: argparse.Namespace) -> dict[str, Any]:
    """Train both, replay both, compare."""
    from benchmarks.acceptance_heldout import heldout_samples

    source = Manifest.load(args.run / "manifest.json")
    heldout = heldout_samples(
        max(args.prompts, 50), args.max_new_tokens, tuple(source.states.boundaries)
    )
    embed_VH = load_target(ensure_checkpoint()).embed_VH
    counts, about = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for codec in PAIR:
            manifest = recoded(args.run, Path(folder) / codec, codec)
            config = finetune_config(
                manifest=str(manifest), out=f"{folder}/{codec}-drafter", epochs=args.epochs,
                batch_tokens=1024, depths=args.steps, learning_rate=1e-3, draft_vocab=4096,
                device="cpu", evaluate_every=1000, checkpoint_every=1000, log_every=10,
            )  # fmt: skip
            trained = finetune(config, lambda text: print(text, flush=True))
            replay = Replay(load_drafter(Path(trained.final)).drafter, embed_VH, steps=args.steps)
            counts[codec] = [r.counts for r in replay.run(heldout)]
            about[codec] = {
                "accept_len": asdict(accept_len(counts[codec])),
                "stored_bytes": Manifest.load(manifest).stored_bytes,
                "training_steps": trained.steps,
            }
    paired = compare(counts["plane"], counts["mantissa-4"])
    d = paired.difference
    return {
        **about, "difference": asdict(d), "verdict": paired.verdict, "text": str(paired),
        "train_samples": source.splits["train"].samples.collected, "epochs": args.epochs,
        "heldout_prompts": d.n_prompts, "draft_steps": args.steps,
        "bars": {
            "on at least 50 held-out prompts": d.n_prompts >= 50,
            "both drafters learnt something": all(a["accept_len"]["low"] > 1 for a in about.values()),
            "mantissa-4 is not shown to be worse": paired.verdict != "worse",
        },
    }  # fmt: skip


def recoded(run: Path, root: Path, codec: str) -> Path:
    """manifest.json of the same samples with their states stored by `codec`."""
    codec_named(codec)  # an unknown one says which there are
    old, layout = RunLayout(run), RunLayout(root)
    reader = RunReader.open(old.manifest)
    root.mkdir(parents=True)
    shutil.copy(old.plan, layout.plan)
    plan, manifest = Plan.open(layout.plan), reader.manifest
    fingerprint = Fingerprint({"of": manifest.fingerprint, "codec": codec})
    fingerprint.save(layout.fingerprint)
    spec = StatesSpec(
        tuple(manifest.states.boundaries), manifest.states.final_norm, manifest.states.dtype,
        manifest.states.hidden_size, codec,
    )  # fmt: skip
    for partition in range(plan.n_partitions):
        place = old.partition(partition)
        store = PartitionStore.open(
            layout.partition(partition), fingerprint_digest=fingerprint.digest, spec=spec,
            shard_bytes=1 << 28,
        )  # fmt: skip
        for path in sorted(place.root.glob("responses-*.arrow")):
            for said in ResponsesReader(path):
                columns, states = reader.columns(said.sample_id), reader.states(said.sample_id)
                store.add_response(said)
                store.add_states(
                    said.prompt_id, said.turn, columns.input_ids, len(said.context_ids),
                    states.reshape(len(states), -1),
                )  # fmt: skip
            store.commit()
        store.seal(len(plan.partition(partition)))
        store.close()
    fields = {k: getattr(manifest, k) for k in ManifestHeader.model_fields}
    states_entry = manifest.states.model_copy(update={"codec": codec})
    header = ManifestHeader(**{**fields, "states": states_entry, "fingerprint": fingerprint.digest})
    build_manifest(layout, plan, header)
    return layout.manifest
