"""The language of a prompt whose source names none, as far as its script tells."""

from __future__ import annotations

import re

from datagen.prompts.normalise import Skeleton

SCRIPTS = (
    ("ja", re.compile("[\u3041-\u30ff]")),
    ("ko", re.compile("[\uac00-\ud7a3\u1100-\u11ff]")),
    ("zh", re.compile("[\u4e00-\u9fff]")),
    ("th", re.compile("[\u0e01-\u0e5b]")),
    ("el", re.compile("[\u0370-\u03ff]")),
    ("he", re.compile("[\u0590-\u05ff]")),
    ("bn", re.compile("[\u0980-\u09ff]")),
    ("ta", re.compile("[\u0b80-\u0bff]")),
    ("te", re.compile("[\u0c00-\u0c7f]")),
    ("und-Cyrl", re.compile("[\u0400-\u04ff]")),
    ("und-Arab", re.compile("[\u0600-\u06ff]")),
    ("und-Deva", re.compile("[\u0900-\u097f]")),
)
LEAST_SHARE = 0.2


def language_of(skeleton: Skeleton) -> str | None:
    """A language (or `und-` and a script) that fills a fifth of the user's text; None for Latin script.

    Which language a Latin script holds is not guessed: it needs a model, and a wrong tag is worse
    than none.
    """
    text = "".join(m["content"] for m in skeleton.messages if m["role"] == "user")
    if text.isascii():
        return None
    least = LEAST_SHARE * len(text)
    for language, script in SCRIPTS:
        if len(script.findall(text)) >= least:
            return language
    return None
