"""Under which conditions a sitting measures: the servers' arguments and environment, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from datagen.errors import MeasurementError

ARGUMENTS = (
    "engine", "version", "model_path", "served_model_name", "revision", "dtype", "tp_size",
    "dp_size", "ep_size", "quantization", "kv_cache_dtype", "attention_backend", "moe_runner_backend",
    "chunked_prefill_size", "disable_radix_cache", "disable_cuda_graph", "cuda_graph_max_bs",
    "disable_overlap_schedule", "mem_fraction_static", "max_running_requests", "context_length",
    "speculative_algorithm", "speculative_draft_model_path", "speculative_draft_model_quantization",
    "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens",
    "speculative_draft_window_size", "speculative_draft_sink_size", "speculative_attention_mode",
    "speculative_draft_attention_backend", "speculative_draft_kv_cache_dtype",
    "speculative_use_rejection_sampling", "speculative_use_block_verification",
    "speculative_accept_threshold_single", "speculative_accept_threshold_acc", "speculative_adaptive",
)  # fmt: skip
THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
SAME = ("model_path", "dtype", "quantization", "tp_size", "kv_cache_dtype")


def known_arguments(info: Mapping[str, Any]) -> dict[str, Any]:
    """Of `/server_info`, what says how the server computes."""
    return {name: info[name] for name in ARGUMENTS if name in info}


def require_servers(
    baseline: Mapping[str, Any], speculative: Mapping[str, Any], baseline_url: str, url: str
) -> None:
    """Raise MeasurementError unless one server drafts with EAGLE3, losslessly, and the other not."""
    algorithm = speculative.get("speculative_algorithm")
    if algorithm == "EAGLE":
        raise MeasurementError(
            "the server was started with --speculative-algorithm EAGLE: it feeds the drafter the "
            "final state in place of the boundaries, and accepts nothing",
            where=url,
            fix="start it with --speculative-algorithm EAGLE3",
        )
    if algorithm != "EAGLE3":
        raise MeasurementError(
            f"the server speculates with {algorithm or 'nothing'}, not EAGLE3",
            where=url,
            fix="start it with --speculative-algorithm EAGLE3 and the drafter",
        )
    for name in THRESHOLDS:
        if speculative.get(name) not in (None, 1, 1.0):
            raise MeasurementError(
                f"{name} is {speculative[name]}: decoding is lossy, and its accept_len no measure",
                where=url,
                fix="leave it at 1.0",
            )
    if speculative.get("speculative_adaptive"):
        raise MeasurementError(
            "the server changes its draft steps as it goes: its accept_len has no K", where=url,
            fix="start it without --speculative-adaptive",
        )  # fmt: skip
    if baseline.get("speculative_draft_model_path") or (
        baseline.get("speculative_algorithm") and baseline.get("speculative_num_steps")
    ):
        raise MeasurementError(
            "the baseline server drafts too", where=baseline_url,
            fix="start it without --speculative-draft-model-path",
        )  # fmt: skip
    for name in SAME:
        if baseline.get(name) != speculative.get(name):
            raise MeasurementError(
                f"{name} is {speculative.get(name)} with the drafter, {baseline.get(name)} without",
                where=baseline_url,
                fix="compare servers that differ in the drafter alone",
            )
