"""Inside SGLang: did every tensor of a drafter's checkpoint arrive in the model? A plugin for benchmarks.

SGLang ignores names that it does not know, without a word. After its own load_weights each tensor given
is looked for, value by value, in the parameter that should hold it (q, k, v and gate, up are slices of
joined ones). $DATAGEN_LOAD_REPORT: {"held": [...], "ignored": [...], "not_needed": ["t2d"]}.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

TARGET = "sglang.srt.models.llama_eagle3.LlamaForCausalLMEagle3.load_weights"
JOINED = {
    "q_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "k_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "v_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "gate_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
    "up_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
}


def register() -> None:
    """Called by SGLang in every process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, _audited, HookType.AROUND)


def _audited(load: Callable[..., Any], model: Any, weights: Iterable[tuple[str, Any]]) -> Any:
    given = [(name, tensor.clone()) for name, tensor in weights]
    out = load(model, given)
    sizes = {name: len(tensor) for name, tensor in given}
    parameters = dict(model.named_parameters())
    found: dict[str, list[str]] = {"held": [], "ignored": [], "not_needed": []}
    for name, tensor in given:
        if name == "t2d":  # the inverse of d2t: SGLang makes none of it
            found["not_needed"].append(name)
        elif name == "d2t":
            ids = model.hot_token_id
            same = ids is not None and bool((ids.cpu() - _counted(ids) == tensor.cpu()).all())
            found["held" if same else "ignored"].append(name)
        else:
            held = _holds(parameters, name, tensor, sizes)
            found["held" if held else "ignored"].append(name)
    Path(os.environ["DATAGEN_LOAD_REPORT"]).write_text(json.dumps(found), encoding="utf-8")
    return out


def _counted(ids: Any) -> Any:
    import torch

    return torch.arange(len(ids))


def _holds(parameters: dict[str, Any], name: str, tensor: Any, sizes: dict[str, int]) -> bool:
    own = name.replace("midlayer.", "layers.0.")
    start, part = 0, own.split(".")[-2]
    if part in JOINED:
        whole, parts = JOINED[part]
        before = parts[: parts.index(part)]
        start = sum(sizes[name.replace(part, p)] for p in before)
        own = own.replace(part, whole)
    parameter = parameters.get(own, parameters.get(f"model.{own}"))
    if parameter is None:
        return False
    held = parameter.detach()[start : start + len(tensor)]
    return held.shape == tensor.shape and bool((held == tensor.to(held.device, held.dtype)).all())
