"""`datagen inspect`: the samples of a run, one of them in full, or what was rejected and why."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, islice
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from datagen.cli.app import app, out
from datagen.cli.commands import RunArgument, RunsDir, run_directory

if TYPE_CHECKING:
    from datagen.store.layout import RunLayout
    from datagen.store.sample import StoredSample

SHOWN_ID = 12


@app.command()
def inspect(
    run: RunArgument = "demo",
    sample: Annotated[str, typer.Option(help="A sample's id, or its beginning.")] = "",
    rejected: Annotated[bool, typer.Option("--rejected", help="List rejections.")] = False,
    first: Annotated[int, typer.Option(min=1, help="Most lines of a list.")] = 20,
    ids: Annotated[bool, typer.Option("--ids", help="Show token ids, not text.")] = False,
    tokenizer: Annotated[str, typer.Option(help="Directory of the target's tokenizer.")] = "",
    runs_dir: RunsDir = "runs",
) -> None:
    """List samples; with --sample show one, its supervised tokens coloured, and its norms."""
    from datagen.store.layout import RunLayout
    from datagen.store.run_status import run_status

    layout = RunLayout(run_directory(run, runs_dir))
    status = run_status(layout.root)
    if sample:
        from datagen.store.sample import open_sample

        _show(open_sample(layout, sample), layout, tokenizer, as_ids=ids)
    elif rejected:
        _list_rejections(layout, first)
    else:
        _list_samples(layout, first, status.responded)


def _list_samples(layout: RunLayout, first: int, total: int) -> None:
    from datagen.store.sample import samples_of

    names = ("sample", "split", "context", "answer", "finish", "states")
    columns = [Column(name, no_wrap=True) for name in names]
    table = Table(*columns, Column("text", no_wrap=True, overflow="ellipsis", ratio=1), expand=True)
    for line in islice(samples_of(layout), first):
        prompt_id, _, turn = line.sample_id.partition("-")
        table.add_row(
            f"{prompt_id[:SHOWN_ID]}-{turn}", line.split, f"{line.context:,}", f"{line.answer:,}",
            line.finish_reason, "yes" if line.has_states else "no",
            escape(" ".join(line.text.split())[:60]),
        )  # fmt: skip
    out.print(table)
    if total > first:
        out.print(f"{first:,} of {total:,} samples with a response; --first N shows more")


def _list_rejections(layout: RunLayout, first: int) -> None:
    from datagen.store.sample import rejections_of

    by_reason = rejections_of(layout)
    if not by_reason:
        out.print("nothing is rejected")
        return
    for reason, entries in by_reason.items():
        table = Table(
            Column("sample", no_wrap=True), "stage", "attempts", "detail",
            title=f"{reason}: {len(entries):,}", title_justify="left",
        )  # fmt: skip
        for entry in entries[:first]:
            prompt_id, _, turn = entry.sample_id.partition("-")
            table.add_row(
                f"{prompt_id[:SHOWN_ID]}-{turn}", entry.stage, str(entry.attempts),
                escape(entry.detail),
            )  # fmt: skip
        out.print(table)


def _show(found: StoredSample, layout: RunLayout, tokenizer: str, *, as_ids: bool) -> None:
    out.print(f"[bold]sample {found.sample_id}[/] ({found.split}, partition {found.partition})")
    if found.rejection is not None:
        why = found.rejection
        text = f"rejected: {why.reason} at {why.stage} after {why.attempts} attempts: {why.detail}"
        out.print(text, style="red", markup=False)
    answer = found.response
    if answer is None:
        if found.rejection is None:
            out.print("pending: no response yet")
        return
    out.print(
        f"{len(answer.context_ids):,} context tokens, {len(answer.response_ids):,} answered, "
        f"ended by {answer.finish_reason}; {answer.endpoint}, attempt {answer.attempts}, "
        f"{answer.server_s:.2f} s, seed {answer.seed}"
    )
    out.rule("[dim]context[/], [green]supervised[/]")
    out.print(_conversation(found, layout, tokenizer, as_ids=as_ids), soft_wrap=True)
    out.rule()
    if found.columns is None:
        out.print("no states are stored")
        return
    table = Table("layer", "median", "supervised", "smallest", "largest", "at token")
    for norms in found.norms:
        numbers = (norms.median, norms.supervised_median, norms.smallest, norms.largest)
        table.add_row(norms.name, *(f"{n:,.4g}" for n in numbers), f"{norms.largest_at:,}")
    out.print("L2 norms over tokens", table, sep="\n")
    out.print(f"{found.shard}: {found.stored_bytes:,} bytes", highlight=False)


def _conversation(found: StoredSample, layout: RunLayout, tokenizer: str, *, as_ids: bool) -> Text:
    """Context dim, supervised tokens green, by the stored mask where there is one."""
    text = Text()
    if as_ids:
        for supervised, span in _spans(found):
            text.append(" ".join(map(str, span)) + " ", "green" if supervised else "dim")
        return text
    from datagen.collect.opening import tokenizer_source
    from datagen.target.tokens import TemplateRenderer

    source, profile = tokenizer_source(layout.root, tokenizer)
    renderer = TemplateRenderer(source, trust_remote_code=profile.trust_remote_code)
    for supervised, span in _spans(found):
        text.append(renderer.text_of(span), "green" if supervised else "dim")
    return text


def _spans(found: StoredSample) -> Iterator[tuple[bool, list[int]]]:
    """Runs of tokens that are supervised, or are not."""
    answer, columns = found.response, found.columns
    if columns is not None:
        pairs = zip(columns.loss_mask.tolist(), columns.input_ids.tolist(), strict=True)
    else:
        assert answer is not None
        n_context, n_answer = len(answer.context_ids), len(answer.response_ids)
        ids = [*answer.context_ids.tolist(), *answer.response_ids.tolist()]
        pairs = zip([0] * n_context + [1] * n_answer, ids, strict=True)
    for supervised, run in groupby(pairs, key=lambda pair: pair[0]):
        yield bool(supervised), [token for _, token in run]
