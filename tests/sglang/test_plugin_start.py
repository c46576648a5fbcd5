"""What the plugin refuses before a server serves (SGLang itself would log the error and go on)."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.sglang.conftest import RealEngine
from tests.sglang.server import python_path

LOAD = "from sglang.srt.plugins import load_plugins; load_plugins(); print('serving')"


def load(engine: RealEngine, code: str = LOAD, **environment: str) -> tuple[int, str]:
    """Exit code and output of a process of SGLang that loads its plugins."""
    base = {k: v for k, v in os.environ.items() if not k.startswith("DATAGEN_")}
    done = subprocess.run(
        [str(engine.installed.python), "-c", code],
        env=base | {
            "PYTHONPATH": python_path(engine.site), **engine.installed.environment,
            "DATAGEN_CAPTURE_DIR": str(engine.folder / "unused"),
            "DATAGEN_CAPTURE_BOUNDARIES": "2,15,27", **environment,
        },
        capture_output=True, text=True, timeout=300, check=False, cwd=engine.folder,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_the_tested_version_loads_and_hooks(real_engine: RealEngine) -> None:
    code = LOAD + (
        "\nfrom sglang.srt.layers.logits_processor import LogitsProcessor as L"
        "\nprint('hooked:', hasattr(L._get_hidden_states_to_store, '__wrapped__'))"
    )
    status, output = load(real_engine, code)
    assert status == 0, output
    assert "hooked: True" in output


def test_without_a_directory_the_plugin_leaves_sglang_alone(real_engine: RealEngine) -> None:
    code = LOAD + (
        "\nfrom sglang.srt.layers.logits_processor import LogitsProcessor as L"
        "\nprint('hooked:', hasattr(L._get_hidden_states_to_store, '__wrapped__'))"
    )
    status, output = load(real_engine, code, DATAGEN_CAPTURE_DIR="")
    assert status == 0, output
    assert "hooked: False" in output


@pytest.mark.parametrize("version", ["0.5.16", "0.5.24", "0.6.0.dev1"])
def test_another_version_is_refused_by_its_name(real_engine: RealEngine, version: str) -> None:
    code = f"import sglang.version; sglang.version.__version__ = {version!r}\n" + LOAD
    status, output = load(real_engine, code)
    assert status == 1
    assert "serving" not in output
    assert f"SGLang {version} is not one of 0.5.17 to 0.5.23" in output
    if version == "0.5.24":
        assert load(real_engine, code, DATAGEN_CAPTURE_ANY_VERSION="1")[0] == 0


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("del L._get_hidden_states_to_store", "has no sglang.srt.layers.logits_processor"),
        (
            "L._get_hidden_states_to_store = lambda self, states: states",
            "calls sglang.srt.layers.logits_processor.LogitsProcessor._get_hidden_states_to_store(",
        ),
    ],
)
def test_a_hook_whose_target_moved_ends_the_server(
    real_engine: RealEngine, change: str, complaint: str
) -> None:
    code = f"from sglang.srt.layers.logits_processor import LogitsProcessor as L\n{change}\n" + LOAD
    status, output = load(real_engine, code)
    assert status == 1
    assert "serving" not in output
    assert complaint in output


@pytest.mark.parametrize("boundaries", ["", "2,x", "15,2", "0,15"])
def test_boundaries_that_make_no_sense_end_the_server(
    real_engine: RealEngine, boundaries: str
) -> None:
    status, output = load(real_engine, DATAGEN_CAPTURE_BOUNDARIES=boundaries)
    assert status == 1
    assert "DATAGEN_CAPTURE_BOUNDARIES=" in output


RULES = """
from importlib import import_module
from types import SimpleNamespace
from datagen.capture.sglang_plugin import _set_boundaries

def model_of(module, name, layers):
    cls = getattr(import_module("sglang.srt.models." + module), name)

    class Model:  # the class's own rule, without its weights
        capture_aux_hidden_states = False
        pp_group = SimpleNamespace(is_last_rank=True, is_first_rank=True)
        config = SimpleNamespace(num_hidden_layers=layers)
        set_eagle3_layers_to_capture = cls.set_eagle3_layers_to_capture

        def __init__(self):
            self.model = SimpleNamespace(layers_to_capture=[], layers=[None] * layers)

        def modules(self):
            return [self, self.model]

    return Model()

for module, name, layers, wanted in [
    ("llama", "LlamaForCausalLM", 30, (2, 15, 27)),
    ("qwen3", "Qwen3ForCausalLM", 36, (2, 18, 33)),
    ("deepseek_v2", "DeepseekV3ForCausalLM", 61, (2, 30, 58)),
    ("deepseek_v2", "DeepseekV3ForCausalLM", 61, (3, 31, 59)),
]:
    model = model_of(module, name, layers)
    assert list(_set_boundaries(model, wanted).layers_to_capture) == list(wanted), (name, wanted)
    print("ok", name, wanted)

outer = SimpleNamespace(language_model=model_of("deepseek_v2", "DeepseekV3ForCausalLM", 61))
kimi = getattr(import_module("sglang.srt.models.kimi_k25"), "KimiK25ForConditionalGeneration")

class Kimi:
    set_eagle3_layers_to_capture = kimi.set_eagle3_layers_to_capture
    language_model = outer.language_model

    def modules(self):
        return [self, *self.language_model.modules()]

assert list(_set_boundaries(Kimi(), (2, 30, 58)).layers_to_capture) == [2, 30, 58]
print("ok Kimi")
try:
    _set_boundaries(model_of("deepseek_v2", "DeepseekV3ForCausalLM", 61), (1, 30, 57))
except RuntimeError as e:
    print("refused", e)
"""


def test_each_model_classes_own_layer_rule_gives_the_boundaries_asked_for(
    real_engine: RealEngine,
) -> None:
    status, output = load(real_engine, RULES, DATAGEN_CAPTURE_DIR="")
    assert status == 0, output
    assert output.count("ok ") == 5
    assert "refused datagen capture: Model captures the inputs of layers" in output
