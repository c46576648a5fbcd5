"""Checks of rendering: whose token ids a run's contexts have, and whether the thinking switch works."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from datagen.target.chat import TOKENIZE
from datagen.target.checks.probes import Evidence
from datagen.target.checks.renderings import rendered_sha256
from datagen.target.checks.subject import Subject
from datagen.target.checks.verdict import Finding, Skipped, ok, red

UNTOLD_FIX = (
    "use a server whose /v1/chat/completions takes return_token_ids and whose /v1/tokenize takes messages "
    "(SGLang since 0.5.17), or render here with --rendering ours"
)


def chosen(subject: Subject, found: Evidence) -> Literal["ours", "server"]:
    """`ours` or `server`: who renders the contexts of a run on this server.

    `auto` asks the server where any of its ids differ from ours; where it tells none, ours are all there is.
    """
    if subject.rendering != "auto":
        return subject.rendering
    differs = any(r.told is not None and r.told != r.ours for r in found.rendered.values())
    return "server" if differs else "ours"


def digest(found: Evidence) -> str | None:
    """sha256 over the chat endpoint's ids of all conversations; None where it does not tell them."""
    told = {name: rendered.told for name, rendered in sorted(found.rendered.items())}
    if None in told.values():
        return None
    return rendered_sha256(told)


def contexts_digest(found: Evidence) -> str:
    """sha256 over what the server renders of all conversations for a run; a refusal is an outcome too."""
    rendered = {
        name: r.server if isinstance(r.server, list) else r.server.reason
        for name, r in sorted(found.rendered.items())
    }
    return rendered_sha256(rendered)


def check_rendering(subject: Subject, found: Evidence) -> Finding:
    """The ids of a run's contexts are those that the server's chat endpoint gives to the model."""
    if not subject.generates:
        raise Skipped("this server only captures")
    who = chosen(subject, found)
    expected = (
        f"the ids of contexts ({'rendered here' if who == 'ours' else 'by the server'}) equal "
    )
    expected += "the chat endpoint's prompt_token_ids"
    n_ids, first, untold = 0, "", ""
    for name, rendered in found.rendered.items():
        if rendered.told is None:
            if who == "server":
                return red(
                    f"'{name}': the server tells no ids: {rendered.chat}", expected, UNTOLD_FIX
                )
            untold = untold or str(rendered.chat)
            continue
        n_ids += len(rendered.told)
        if rendered.ours != rendered.told and not first:
            first = _difference(name, rendered.ours, rendered.told, "here", "there")
        if who == "server" and rendered.server != rendered.told:
            said = rendered.server
            if not isinstance(said, list):
                return red(
                    f"'{name}': {TOKENIZE}, or a chat in its place: {said}", expected, UNTOLD_FIX
                )
            return red(
                _difference(name, said, rendered.told, "by /v1/tokenize", "in the chat"),
                expected,
                UNTOLD_FIX,
            )
    told = f"{len(found.rendered)} conversations, {n_ids:,} ids"
    if who == "server":
        how = ""
        if subject.client.chats.route != TOKENIZE:
            how = f" (by chats of one token: {TOKENIZE} answers 500)"
        return ok(
            f"rendered by the server{how}: {told}" + (f"; {first}" if first else ""), expected
        )
    if first:
        return red(
            first,
            expected,
            "take the server's ids with --rendering server (auto does); or give the server's tokenizer "
            "and template with --tokenizer",
        )
    if untold:
        raise Skipped(f"the server does not tell its prompt ids: {untold}")
    return ok(f"rendered here: {told}", expected)


def check_thinking(subject: Subject, found: Evidence) -> Finding:
    """The profile's switch changes the prompt, on the server and where the run renders."""
    kwarg = subject.profile.thinking_kwarg
    if not subject.generates:
        raise Skipped("this server only captures")
    if kwarg is None:
        raise Skipped("the profile has no thinking switch")
    on, off = (found.rendered[f"one turn, thinking {mode}"] for mode in ("on", "off"))
    expected = f"{kwarg}: true and {kwarg}: false give different prompts, here and on the server"
    if on.ours == off.ours and (chosen(subject, found) == "ours" or on.told == off.told):
        return red(
            f"the template renders the same with {kwarg} true and false",
            expected,
            "correct thinking_kwarg in the profile, or null for a model without the switch",
        )
    if on.told is None or off.told is None:
        return ok("different here; the server does not tell its prompt ids", expected)
    if on.told == off.told:
        return red(
            f"the server ignores {kwarg}: the same prompt with true and false",
            expected,
            "start the server with the model's own chat template (no --chat-template), on a version "
            "that takes chat_template_kwargs; answers of one mode would be recorded as the other's",
        )
    return ok(f"{len(on.told)} and {len(off.told)} tokens", expected)


def _difference(
    name: str, one: Sequence[int] | str, other: Sequence[int], here: str, there: str
) -> str:
    """Where two renderings part."""
    if isinstance(one, str):
        return f"'{name}': {one}"
    place = next(
        (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )
    return (
        f"'{name}' differs from token {place} on ({len(one)} tokens {here}, {len(other)} {there})"
    )
