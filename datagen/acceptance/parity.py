"""Samples made of a live run's own outputs: their boundaries are captured afterwards, by prefill.

Greedy texts with and without speculation may part at near-ties, so replay and server are compared on
what the speculative run itself put out.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from datagen.acceptance.live import Answer
from datagen.acceptance.replay import as_ids
from datagen.capture.spool import discard
from datagen.drafter.dataset import TORCH_DTYPES, as_tensor
from datagen.drafter.rows import Sample
from datagen.errors import MeasurementError
from datagen.target.capture import rows_of, take_capture
from datagen.target.client import SGLangClient
from datagen.target.failures import CapacityFailure, EndpointFailure, RowFailure
from datagen.target.profile import Profile


async def captured_outputs(
    url: str, answers: Sequence[Answer], profile: Profile
) -> list[tuple[Sample, Answer]]:
    """Every answer that ran a verify step, with the states of its context and output.

    `url`: a server that captures. Raises MeasurementError, CaptureUnproven.
    """
    drafted = [a for a in answers if a.generation.spec_verify_ct]
    async with SGLangClient(url) as client:
        return [(await _captured(client, answer, profile), answer) for answer in drafted]


async def _captured(client: SGLangClient, answer: Answer, profile: Profile) -> Sample:
    rid = f"parity-{uuid.uuid4().hex}"
    ids = [*answer.prompt.context_ids, *answer.generation.output_ids.tolist()]
    try:
        capture = await client.capture(ids, rid=rid)
        spooled = await take_capture(capture, ids, rid, profile)
    except (RowFailure, CapacityFailure, EndpointFailure) as e:
        raise MeasurementError(
            f"the states of sample {answer.prompt.sample_id[:16]} cannot be captured: {e}",
            where=client.url, fix="take parity on a server with the capture plugin",
        ) from e  # fmt: skip
    width = len(profile.boundaries) * profile.hidden_size
    rows_TW = rows_of(spooled)[:, :width].copy()  # out of the mapped file, which goes now
    discard(capture.path)
    return Sample(
        sample_id=answer.prompt.sample_id,
        ids_N=as_ids(ids),
        n_context=len(answer.prompt.context_ids),
        features_NW=as_tensor(rows_TW, TORCH_DTYPES[profile.capture_dtype]),
        final_NH=None,
    )
