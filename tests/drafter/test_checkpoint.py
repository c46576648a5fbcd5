"""Checkpoints: exactly SGLang's names, read strictly, compared tensor by tensor."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from datagen.drafter.checkpoint import export_files, load_drafter, write_directory
from datagen.drafter.compare import compare
from datagen.drafter.config import canonical_ids, engine_ids, read_config
from datagen.drafter.rope import Rope
from datagen.errors import ConfigError
from tests.drafter.small import H, U, V, drafter, vocab

SGLANG_NAMES = {
    "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d",
    "midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight",
    "midlayer.post_attention_layernorm.weight", "midlayer.self_attn.q_proj.weight",
    "midlayer.self_attn.k_proj.weight", "midlayer.self_attn.v_proj.weight",
    "midlayer.self_attn.o_proj.weight", "midlayer.mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight", "midlayer.mlp.down_proj.weight",
}  # fmt: skip


def export(
    directory: Path, *, seed: int = 0, context: int = 4096, kind: str = "llama",
    dtype: str = "float32", **changes: Any,
) -> Path:  # fmt: skip
    made = drafter(seed, **changes)
    write_directory(
        directory,
        lambda d: export_files(
            d, made.config, made.state_dict(), target_type=kind, context_length=context, dtype=dtype
        ),
    )
    return directory


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    raw = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))


def edit_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    tensors = {**load_file(directory / "model.safetensors"), **changes}
    kept = {k: v for k, v in tensors.items() if v is not None}
    save_file(kept, directory / "model.safetensors")


def test_an_export_has_exactly_sglangs_names_and_no_embedding(tmp_path: Path) -> None:
    out = export(tmp_path / "d", dtype="bfloat16")
    tensors = load_file(out / "model.safetensors")
    assert set(tensors) == SGLANG_NAMES
    assert tensors["fc.weight"].dtype == torch.bfloat16
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]


def test_the_config_says_all_that_sglang_would_otherwise_guess(tmp_path: Path) -> None:
    rope = Rope(5e4, "yarn", (("factor", 4.0), ("original_max_position_embeddings", 1024.0)))
    raw = json.loads((export(tmp_path / "d", rope=rope) / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"]
    assert raw["tie_word_embeddings"] is False
    assert raw["draft_vocab_size"] == U
    assert raw["head_dim"] == 8  # not hidden_size / heads = 4
    assert raw["rope_parameters"]["rope_theta"] == raw["rope_theta"] == 5e4
    assert raw["rope_scaling"]["rope_type"] == raw["rope_parameters"]["rope_type"] == "yarn"
    assert raw["max_position_embeddings"] == 4096
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 3]


def test_what_is_written_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    made = drafter(norm_before_fc=True, norm_output=True)
    loaded = load_drafter(export(tmp_path / "d", norm_before_fc=True, norm_output=True))
    assert loaded.vocab.digest == vocab().digest
    assert loaded.drafter.config == read_config(tmp_path / "d" / "config.json")
    assert loaded.drafter.config.boundaries == (1, 3, 4)
    for name, tensor in made.state_dict().items():
        assert torch.equal(loaded.drafter.state_dict()[name], tensor), name


def test_a_published_checkpoint_is_read(tmp_path: Path) -> None:
    """AQ-MedAI's manner: embedding absent or present, layers.0, no head_dim, raw engine ids."""
    out = export(tmp_path / "d", num_kv_heads=4)
    tensors = load_file(out / "model.safetensors")
    renamed = {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}
    save_file({**renamed, "embed_tokens.weight": torch.zeros(V, H)}, out / "model.safetensors")
    edit_config(
        out, head_dim=None, datagen=None, rope_parameters=None, num_aux_hidden_states=None,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 30, 58]},
    )  # fmt: skip
    assert load_drafter(out).drafter.config.boundaries is None
    read = load_drafter(out, target_type="kimi_k25").drafter.config
    assert read.boundaries == (2, 30, 58)
    assert read.head_dim == 8
    assert load_drafter(out, target_type="llama").drafter.config.boundaries == (3, 31, 59)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"norm.weight": None}, "missing norm.weight"),
        ({"midlayer.self_attn.q_norm.weight": torch.ones(8)}, "unknown midlayer.self_attn.q_norm"),
        ({"fc.weight": torch.zeros(H, 2 * H)}, "fc.weight is"),
        ({"d2t": torch.zeros(U, dtype=torch.long)}, "different tokens"),
        ({"lm_head.weight": torch.zeros(U, H, dtype=torch.int8)}, "lm_head.weight is torch.int8"),
    ],
)
def test_damage_is_refused_by_name(
    tmp_path: Path, change: dict[str, torch.Tensor | None], named: str
) -> None:
    out = export(tmp_path / "d")
    edit_tensors(out, **change)
    with pytest.raises(ConfigError, match=named):
        load_drafter(out)


@pytest.mark.parametrize(
    "change", [{"num_hidden_layers": 2}, {"attention_bias": True}, {"fc_norm": True}]
)
def test_configs_beyond_this_model_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    out = export(tmp_path / "d")
    edit_config(out, **change)
    with pytest.raises(ConfigError, match=next(iter(change))):
        load_drafter(out)


@pytest.mark.parametrize("kind", ["llama", "kimi_k25", "deepseek_v3", "qwen3"])
def test_engine_ids_and_boundaries_are_inverse(kind: str) -> None:
    assert canonical_ids(engine_ids((2, 30, 58), kind), kind) == (2, 30, 58)


def test_kimis_ids_are_verbatim_and_llamas_count_from_the_output() -> None:
    assert engine_ids((2, 30, 58), "kimi_k25") == [2, 30, 58]
    assert engine_ids((2, 15, 27), "llama") == [1, 14, 26]
    assert canonical_ids([1, 29, 57], "kimi_k25") == (2, 30, 58)
    for boundaries, kind in (((0, 3, 4), "llama"), ((1, 3, 4), "kimi_k25")):
        with pytest.raises(ConfigError, match="cannot be told"):
            engine_ids(boundaries, kind)


def test_a_replaced_directory_is_whole(tmp_path: Path) -> None:
    export(tmp_path / "d", seed=0)
    export(tmp_path / "d", seed=1)
    assert [p.name for p in tmp_path.iterdir()] == ["d"]
    assert torch.equal(load_drafter(tmp_path / "d").drafter.fc.weight, drafter(1).fc.weight)


def test_trained_weights_of_one_shape_are_drop_in(tmp_path: Path) -> None:
    a, b = export(tmp_path / "a"), export(tmp_path / "b", seed=1, dtype="bfloat16")
    edit_tensors(a, **{"embed_tokens.weight": torch.zeros(V, H)})
    found = compare(a, b)
    assert found.drop_in
    verdicts = {t.name: t.verdict for t in found.tensors}
    assert verdicts["d2t"] == "same map"
    assert verdicts["fc.weight"] == "other values, other dtype"
    assert "may be absent" in verdicts["embed_tokens.weight"]


def test_a_rebuilt_vocabulary_map_is_not_drop_in(tmp_path: Path) -> None:
    a, b = export(tmp_path / "a"), export(tmp_path / "b")
    edit_tensors(b, d2t=vocab(5).d2t, t2d=vocab(5).t2d)
    found = compare(a, b)
    assert not found.drop_in
    assert any("d2t: another vocabulary map" in r for r in found.reasons)


def test_the_command_prints_a_table_and_exits_by_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from datagen import cli
    from datagen.cli.app import out

    monkeypatch.setattr(out, "_width", 400)
    a, b = export(tmp_path / "a"), export(tmp_path / "b", rope=Rope(1e6))

    def run(*more: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["datagen", "drafter", "compare", *more])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    code, table, _ = run(str(a), str(a))
    assert code == 0
    assert "midlayer.self_attn.q_proj.weight" in table
    assert "drop-in compatible" in table
    code, printed, _ = run(str(a), str(b), "--json")
    assert code == 1
    report = json.loads(printed)
    assert not report["drop_in"]
    assert any(r.startswith("rope is") for r in report["reasons"])
    code, _, error = run(str(a), str(tmp_path / "nowhere"))
    assert code == 1
    assert error.count("\n") == 1
    assert "nowhere" in error
