"""`datagen inspect` shows what the disk holds, of complete runs and of unfinished ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from datagen.cli import inspect as view
from datagen.cli.app import app
from datagen.errors import NoSuchSample
from datagen.store.guards import row_norms
from datagen.store.layout import RunLayout
from datagen.store.sample import open_sample, rejections_of, samples_of
from tests.store.rows import (
    SPEC,
    collect_partition,
    complete_run,
    prepare_run,
    prompt_id,
    response,
    states_of,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inspect") / "run"
    complete_run(root)
    return root


def said(root: Path, *arguments: str) -> str:
    done = CliRunner().invoke(app, ["inspect", str(root), *arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_sample_shows_its_tokens_and_the_norms_of_every_boundary(run: Path) -> None:
    answer = response(1)
    found = open_sample(RunLayout(run), f"{prompt_id(1)}-0")
    assert found.columns is not None
    assert found.columns.input_ids.tolist() == [*answer.context_ids, *answer.response_ids]
    norms_TL = row_norms(states_of(answer).reshape(-1, SPEC.n_layers, SPEC.hidden_size), "BF16")
    for layer, norms in enumerate(found.norms):
        assert norms.median == pytest.approx(np.median(norms_TL[:, layer]))
        assert norms.largest == norms_TL[norms.largest_at, layer]
    assert [n.name for n in found.norms] == [
        "boundary 1", "boundary 3", "boundary 4", "the final state",
    ]  # fmt: skip
    assert found.norms[0].largest > 20 * found.norms[0].median, "the sink is shown, and not hidden"
    text = said(run, "--sample", prompt_id(1)[:10], "--ids")
    assert " ".join(map(str, answer.response_ids)) in text.replace("\n", "")
    assert "boundary 3" in text


def test_supervised_tokens_are_coloured_and_no_others(run: Path) -> None:
    layout, answer = RunLayout(run), response(0, 1)
    text = view._conversation(open_sample(layout, f"{prompt_id(0)}-1"), layout, "", as_ids=True)
    green = "".join(text.plain[s.start : s.end] for s in text.spans if s.style == "green")
    assert green.split() == [str(i) for i in answer.response_ids]
    dim = "".join(text.plain[s.start : s.end] for s in text.spans if s.style == "dim")
    assert dim.split() == [str(i) for i in answer.context_ids]


def test_the_list_names_every_sample_with_its_lengths(run: Path) -> None:
    lines = list(samples_of(RunLayout(run)))
    assert len(lines) == 9
    first = next(x for x in lines if x.sample_id == f"{prompt_id(0)}-0")
    assert (first.context, first.answer) == (
        len(response(0).context_ids),
        len(response(0).response_ids),
    )
    text = said(run, "--first", "3")
    assert f"{prompt_id(0)[:12]}-0" in text
    assert "3 of 9 samples" in text


def test_rejections_are_listed_by_reason(run: Path) -> None:
    assert {k: len(v) for k, v in rejections_of(RunLayout(run)).items()} == {"over_context": 1}
    text = said(run, "--rejected")
    assert "over_context: 1" in text
    assert prompt_id(3)[:12] in text
    assert "too long by 7 tokens" in text
    assert "rejected: over_context" in said(run, "--sample", prompt_id(3))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("zz", "names 0 samples"), ("-0", "names 0 samples"), (prompt_id(1) + "-7", "has no turn 7"),
        (prompt_id(1) + "-x", "names no samples"),
    ],
)  # fmt: skip
def test_a_name_that_fits_no_sample_is_one_clear_error(run: Path, name: str, words: str) -> None:
    with pytest.raises(NoSuchSample, match=words):
        open_sample(RunLayout(run), name)


def test_an_unfinished_run_is_read_from_its_open_files(tmp_path: Path) -> None:
    layout, plan = prepare_run(tmp_path / "run")
    collect_partition(layout, plan, 0, seal=False, limit=2, shard_bytes=1 << 20)
    assert list((tmp_path / "run").rglob("*.part"))
    assert len(list(samples_of(layout))) == 3
    assert open_sample(layout, f"{prompt_id(1)}-0").norms
    pending = said(layout.root, "--sample", prompt_id(5))
    assert "pending: no response yet" in pending
