"""What a server says of itself: its identity, its limits, the arguments that matter."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from datagen.errors import CaptureUnproven, WrongTarget
from datagen.target.client import SGLangClient
from datagen.target.profile import Profile

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


def context_of(info: dict[str, Any], profile: Profile) -> int:
    """Tokens that no prompt may reach, as a server says of itself.

    SGLang refuses prompts a few tokens short of its context; what it answered must be one to be captured.
    """
    said = (info.get(name) for name in ("context_length", "max_req_input_len"))
    return min((int(n) for n in said if n), default=profile.context_length)


async def inspect_server(
    client: SGLangClient, profile: Profile, *, any_model: bool = False
) -> ServerReport:
    """Who answers at this address. Raises EndpointDown, and WrongTarget unless `any_model`."""
    info = await client.server_info()
    model = await client.model_info()
    names = [
        str(n)
        for n in (model.get("model_path"), info.get("model_path"), info.get("served_model_name"))
        if n
    ]
    if not any_model and not profile.serves(*names):
        raise WrongTarget(
            f"the server serves {names[0] if names else 'an unnamed model'}, the target is {profile.model}",
            where=client.url,
            fix=f"point --endpoints at a server of {profile.model}, or choose the matching --target",
        )
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
        context_length=min(context_of(info, profile), profile.context_length),
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
