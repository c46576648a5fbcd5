"""SGLang plugin: publishes the hidden states of opted-in prefills in the spool. SGLang 0.5.17 to 0.5.23.

Runs inside the server's processes (`pip install --no-deps datagen` there; entry point group
`sglang.srt.plugins`, name `datagen_capture`). Inert unless DATAGEN_CAPTURE_DIR is set.
Server : DATAGEN_CAPTURE_DIR, DATAGEN_CAPTURE_BOUNDARIES=2,30,58; flag --enable-return-hidden-states.
Request: see spool.py. Answer: meta_info.datagen = [what writer.SpoolWriter.publish returns, `chunks`,
`self_test`] or [{"error"}]; no such key means that the plugin is not live.

A row is the K boundaries in order, then the state after the final norm, which lm_head reads. The final
state is concatenated on the device, so that SGLang's own asynchronous copy carries it, and in a fresh
tensor, so that no later replay of a prefill graph overwrites what is being copied.
"""

from __future__ import annotations

import inspect
import logging
import os
import pkgutil
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from datagen.capture.assembly import Assembler
from datagen.capture.sglang_proof import SelfTest
from datagen.capture.spool import SpoolError
from datagen.capture.writer import RowFormat, SpoolWriter, limits_from_environment

log = logging.getLogger(__name__)
TESTED = ((0, 5, 17), (0, 5, 23))
KEY = "datagen"
DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_PROCESSOR = (
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
)
INIT = "sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backends"
STORE = "sglang.srt.layers.logits_processor.LogitsProcessor._get_hidden_states_to_store"
COPY = "sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu"
PREFILL = f"{_PROCESSOR}._append_prefill_hidden_states"
DECODE = f"{_PROCESSOR}._append_decode_hidden_states"
PARAMETERS = {
    INIT: ("self",),
    STORE: (
        "self", "hidden_states", "hidden_states_before_norm", "aux_hidden_states", "pruned_states",
        "pruned_states_before_norm", "aux_pruned_states", "sample_indices", "logits_metadata",
    ),
    COPY: ("self", "return_logprob", "return_hidden_states"),
    PREFILL: (
        "self", "req", "logits_output", "hidden_state_offset", "capture_hidden_mode",
        "extend_input_len", "store",
    ),
    DECODE: ("req", "hidden_states", "start", "accept_len"),
}  # fmt: skip


@dataclass(slots=True)
class _Live:
    """This process's part: `assembler` is None on ranks that compute the same rows and write none."""

    proof: SelfTest
    row_format: RowFormat
    assembler: Assembler | None


_live: _Live | None = None
_originals: dict[str, Any] = {}


def register() -> None:
    """Called by SGLang in every process. Ends the process when this version cannot be hooked."""
    if not os.environ.get("DATAGEN_CAPTURE_DIR"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.version import __version__

    _require_tested(__version__)
    _boundaries()
    hooks = {
        INIT: _configure, STORE: _widen, COPY: _copy, PREFILL: _on_prefill, DECODE: _on_decode
    }  # fmt: skip
    for target, hook in hooks.items():
        _originals[target] = _found(target, __version__)
        HookRegistry.register(target, hook, HookType.AROUND)


def _refuse(text: str) -> NoReturn:
    """SGLang logs a plugin's exceptions and serves without it; SystemExit is the one it lets through."""
    log.critical("datagen capture: %s", text)
    raise SystemExit(f"datagen capture: {text}")


def _require_tested(version: str) -> None:
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    number = tuple(map(int, found.groups())) if found else ()
    if TESTED[0] <= number <= TESTED[1] or os.environ.get("DATAGEN_CAPTURE_ANY_VERSION") == "1":
        return
    low, high = (".".join(map(str, v)) for v in TESTED)
    _refuse(
        f"SGLang {version} is not one of {low} to {high}, with which this plugin is tested; "
        "set DATAGEN_CAPTURE_ANY_VERSION=1 to try it"
    )


def _boundaries() -> tuple[int, ...]:
    text = os.environ.get("DATAGEN_CAPTURE_BOUNDARIES", "")
    try:
        boundaries = tuple(int(b) for b in text.split(","))
    except ValueError:
        boundaries = ()
    if not boundaries or list(boundaries) != sorted(set(boundaries)) or boundaries[0] < 1:
        _refuse(
            f"DATAGEN_CAPTURE_BOUNDARIES={text!r} must be rising layer numbers from 1 on, such as "
            "2,30,58 (i: the stream entering decoder layer i)"
        )
    return boundaries


def _found(target: str, version: str) -> Any:
    try:
        function = pkgutil.resolve_name(target)
        parameters = tuple(inspect.signature(function).parameters)
    except (ImportError, AttributeError, ValueError, TypeError) as e:
        _refuse(f"SGLang {version} has no {target}: {type(e).__name__}: {e}")
    if parameters != PARAMETERS[target]:
        _refuse(f"SGLang {version} calls {target}{parameters}, not {PARAMETERS[target]}")
    return function


# -- AROUND ModelRunner.init_attention_backends: before graphs are captured; raising ends the server ----


def _configure(orig: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    global _live
    from sglang.srt.runtime_context import get_parallel
    from sglang.version import __version__

    out = orig(self, *args, **kwargs)
    ranks, boundaries = get_parallel(), _boundaries()
    unhooked = [t for t, original in _originals.items() if pkgutil.resolve_name(t) is original]
    if unhooked:
        raise RuntimeError(f"datagen capture: SGLang did not apply the hooks on {unhooked}")
    if self.is_draft_worker or not self.spec_algorithm.is_none():
        raise RuntimeError("datagen capture: a draft model runs; start the server without one")
    if ranks.pp_size != 1 or ranks.attn_cp_size != 1:
        raise RuntimeError("datagen capture: pipeline and context parallelism must be 1")
    if getattr(self.server_args, "enable_two_batch_overlap", False):
        raise RuntimeError("datagen capture: two-batch overlap bypasses the capture of boundaries")
    inner = _set_boundaries(self.model, boundaries)
    config = self.model_config
    n_layers = len(inner.layers)
    if boundaries[-1] >= n_layers:
        raise RuntimeError(f"datagen capture: boundaries {boundaries} of {n_layers} layers")
    row_format = RowFormat(
        boundaries, int(config.hidden_size), "post", DTYPES[self.dtype], f"sglang {__version__}"
    )
    assembler = None
    if ranks.attn_tp_rank == 0:
        directory = Path(os.environ["DATAGEN_CAPTURE_DIR"])
        writer = SpoolWriter(directory, limits_from_environment(os.environ))
        assembler = Assembler(writer, row_format, time.monotonic)
    _live = _Live(SelfTest(inner, boundaries, row_format.hidden), row_format, assembler)
    log.warning("datagen capture: live, %s, writes: %s", row_format, assembler is not None)
    return out


def _set_boundaries(model: Any, boundaries: tuple[int, ...]) -> Any:
    """Set, then read back: model classes differ in what their layer ids mean. Returns the inner model."""

    def inner() -> Any:
        for module in model.modules():
            if getattr(module, "layers_to_capture", None):
                return module
        return None

    wanted = list(boundaries)
    if inner() is None:  # no --return-aux-hidden-state-layer-ids: the choice is ours
        if not hasattr(model, "set_eagle3_layers_to_capture"):
            raise RuntimeError(f"datagen capture: {type(model).__name__} cannot capture boundaries")
        for ids in ([b - 1 for b in wanted], wanted):
            model.set_eagle3_layers_to_capture(ids)
            if inner() is not None and list(inner().layers_to_capture) == wanted:
                break
    module = inner()
    captured = [] if module is None else list(module.layers_to_capture)
    if captured != wanted:
        raise RuntimeError(
            f"datagen capture: {type(model).__name__} captures the inputs of layers {captured}, "
            f"DATAGEN_CAPTURE_BOUNDARIES wants {wanted}"
        )
    return module


# -- on the device, then on its way to the host ---------------------------------------------------------


def _widen(orig: Any, self: Any, hidden_states: Any, before_norm: Any, aux: Any, *rest: Any) -> Any:
    """AROUND _get_hidden_states_to_store: [tokens, K*H] -> [tokens, (K+1)*H] where rows are kept."""
    metadata = rest[-1]
    if _live is None or aux is None:
        return orig(self, hidden_states, before_norm, aux, *rest)
    if _live.proof.pending:
        _live.proof.compare(aux, prefill=bool(metadata.forward_mode.is_extend()))
    if not metadata.capture_hidden_mode.is_full() or before_norm is not None:
        return orig(self, hidden_states, before_norm, aux, *rest)
    if _live.assembler is None:
        return hidden_states  # nobody reads it on this rank: no concatenation, no copy
    parts = [aux] if isinstance(aux, torch.Tensor) else list(aux)
    return torch.cat([*parts, hidden_states], dim=-1)


def _copy(orig: Any, self: Any, return_logprob: bool, return_hidden_states: bool = True) -> Any:
    """AROUND copy_to_cpu: ranks that do not write do not copy either."""
    copies = return_hidden_states and (_live is None or _live.assembler is not None)
    return orig(self, return_logprob, copies)


# -- on the host ----------------------------------------------------------------------------------------


def _on_decode(orig: Any, **kwargs: Any) -> None:
    """AROUND _append_decode_hidden_states, of requests that ask for JSON."""
    if _live is None or _live.assembler is not None:
        orig(**kwargs)


def _on_prefill(
    orig: Any,
    self: Any,
    *,
    req: Any,
    logits_output: Any,
    hidden_state_offset: int,
    capture_hidden_mode: Any,
    extend_input_len: int,
    store: bool = True,
) -> Any:
    """AROUND _append_prefill_hidden_states: every request of every prefill batch, chunk by chunk."""
    full = bool(capture_hidden_mode.is_full())
    end = hidden_state_offset + (extend_input_len if full else 1)
    if _live is not None and _live.assembler is None:
        return end
    custom = getattr(req.sampling_params, "custom_params", None)
    if not (isinstance(custom, dict) and custom.get(KEY)):
        return orig(
            self, req=req, logits_output=logits_output, hidden_state_offset=hidden_state_offset,
            capture_hidden_mode=capture_hidden_mode, extend_input_len=extend_input_len, store=store,
        )  # fmt: skip
    try:
        if _live is None or _live.assembler is None:
            raise SpoolError("this server never configured its capture")
        if not full or req.return_hidden_states is not True:
            raise SpoolError("a capture needs return_hidden_states: true, not 'last'")
        if req.sampling_params.max_new_tokens != 1:
            raise SpoolError("a capture needs max_new_tokens: 1")
        rows = slice(hidden_state_offset, end)
        note = _taken(_live, _live.assembler, req, logits_output, rows, store)
    except (SpoolError, OSError) as e:  # of this request alone; the client sees why
        note = {"error": f"{type(e).__name__}: {e}"}
    if note is not None:
        req.customized_info = {**(req.customized_info or {}), KEY: [note]}
    return end


def _taken(
    live: _Live, assembler: Assembler, req: Any, output: Any, rows: slice, store: bool
) -> dict[str, Any] | None:
    """Hand one chunk's rows on; the answer when they were the last. Raises SpoolError, OSError."""
    unfinished = req.inflight_middle_chunks > 0
    if req.finished() or req.is_retracted or not (store or unfinished):
        assembler.drop(req.rid)
        return None
    wanted, states_TW = live.row_format, output.hidden_states
    if states_TW.shape[1] != wanted.width or DTYPES.get(states_TW.dtype) != wanted.dtype:
        assembler.drop(req.rid)
        raise SpoolError(
            f"rows of {states_TW.shape[1]} {states_TW.dtype}, not {wanted.width} {wanted.dtype}: "
            "another plugin, or a model that hands over its states before the final norm"
        )
    row_bytes = wanted.row_bytes
    note = assembler.add(
        req.rid,
        _bytes_of(output)[rows.start * row_bytes : rows.stop * row_bytes],
        generation=int(getattr(req, "retraction_count", 0)),
        ended=not unfinished,
        input_ids=req.origin_input_ids,
    )
    return None if note is None else {**note, "self_test": live.proof.verdict}


def _bytes_of(output: Any) -> memoryview:
    """The rows of a whole batch, on the host; made once, kept with the output of all its requests."""
    states_TW = output.hidden_states
    known = getattr(output, "datagen_rows", None)
    if known is None or known[0] is not states_TW:
        on_host = states_TW.contiguous().cpu()  # overlap scheduling has put it there: no copy
        known = (states_TW, on_host.view(torch.uint8).numpy().data.cast("B"))
        output.datagen_rows = known
    found: memoryview = known[1]
    return found
