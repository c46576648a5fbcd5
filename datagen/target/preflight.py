"""Proof before volume: what a server serves and captures, shown on a probe before any row is spent."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from datagen.errors import CaptureUnproven, WrongTarget
from datagen.target.client import SGLangClient
from datagen.target.failures import CapacityFailure, EndpointFailure, RowFailure
from datagen.target.profile import Profile
from datagen.target.states import Mode, capture_rows

ARGUMENTS = (
    "tp_size", "dp_size", "chunked_prefill_size", "disable_radix_cache", "speculative_algorithm",
    "attention_backend", "quantization", "kv_cache_dtype", "return_hidden_states_mode",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TargetIdentity:
    """What decides the rows of a server: the same for every endpoint of a run."""

    profile: str
    model: str
    revision: str
    dtype: str


@dataclass(frozen=True, slots=True)
class ServerReport:
    """One endpoint as found: identity, engine, limits, and the arguments that matter."""

    url: str
    identity: TargetIdentity
    engine: str
    context_length: int
    max_running_requests: int | None
    cuda_graph_max_bs: int | None
    arguments: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for the manifest."""
        return asdict(self)


async def inspect_server(client: SGLangClient, profile: Profile) -> ServerReport:
    """Who answers at this address. Raises EndpointDown, WrongTarget."""
    info = await client.server_info()
    model = await client.model_info()
    names = [
        str(n)
        for n in (model.get("model_path"), info.get("model_path"), info.get("served_model_name"))
        if n
    ]
    if not profile.serves(*names):
        raise WrongTarget(
            f"the server serves {names[0] if names else 'an unnamed model'}, the target is {profile.model}",
            where=client.url,
            fix=f"point --endpoints at a server of {profile.model}, or choose the matching --target",
        )
    context = int(info.get("context_length") or profile.context_length)
    running, graphs = info.get("max_running_requests"), info.get("cuda_graph_max_bs")
    return ServerReport(
        url=client.url,
        identity=TargetIdentity(
            profile=profile.name,
            model=profile.model,
            revision=str(info.get("revision") or "unstated"),
            dtype=str(info.get("dtype") or "unstated"),
        ),
        engine=f"{info.get('engine', 'sglang')} {info.get('version', 'unstated')}",
        context_length=min(context, profile.context_length),
        max_running_requests=int(running) if running else None,
        cuda_graph_max_bs=int(graphs) if graphs and not info.get("disable_cuda_graph") else None,
        arguments={k: info[k] for k in ARGUMENTS if k in info},
    )


def require_whole_prefills(report: ServerReport) -> None:
    """JSON states need prefills in one piece: SGLang drops the rows of all chunks but the last.

    Raises CaptureUnproven.
    """
    chunk = report.arguments.get("chunked_prefill_size")
    if chunk is not None and int(chunk) > 0:
        raise CaptureUnproven(
            f"the server prefills in chunks of {chunk} tokens, which loses rows of JSON states",
            where=report.url,
            fix="start it with --chunked-prefill-size -1, or capture through the spool",
        )


async def prove_capture(
    client: SGLangClient,
    profile: Profile,
    probe_ids: Sequence[int],
    *,
    mode: Mode = "spool",
    final: SGLangClient | None = None,
) -> None:
    """Capture one probe and check it against the profile: width, boundaries, norm, rows, values.

    Raises CaptureUnproven, naming the flag to change.
    """
    rid = f"preflight-{uuid.uuid4().hex}"
    try:
        captured = await capture_rows(client, probe_ids, rid, profile, mode=mode, final=final)
    except RowFailure as e:
        raise CaptureUnproven(
            f"the probe capture failed: {e}",
            where=client.url,
            fix="start the server with the capture plugin, DATAGEN_CAPTURE_DIR and "
            "DATAGEN_CAPTURE_BOUNDARIES set, on this host (`datagen launch --role capture`)"
            if mode == "spool"
            else "start the server with --enable-return-hidden-states",
        ) from e
    except (CapacityFailure, EndpointFailure) as e:
        raise CaptureUnproven(
            f"the server failed on the probe: {e}", where=client.url, fix="see the server's log"
        ) from e
    captured.discard()  # the rows stay mapped
    bits_TLH = captured.rows.reshape(len(probe_ids), -1, profile.hidden_size)
    for index, name in enumerate([*map(str, profile.boundaries), "final"]):
        bits_TH = bits_TLH[:, index]
        if not (bits_TH & 0x7FFF).any() or (bits_TH == bits_TH[:1]).all():
            raise CaptureUnproven(
                f"boundary {name} is constant or all zero on the probe",
                where=client.url,
                fix="the engine hands over an unset buffer: update it, or disable prefill graphs",
            )
