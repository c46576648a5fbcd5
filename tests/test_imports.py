"""Who may import whom. Layers go down; heavy libraries stay in their rooms."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DATAGEN, FLOWS = ROOT / "datagen", ROOT / "flows"
LAYERS = (
    ("cli",),
    ("collect", "finetune", "evaluate"),
    ("config",),
    ("report", "export"),
    ("embedded",),
    ("acceptance",),
    ("drafter",),
    ("fanout", "prompts"),
    ("target",),
    ("capture",),
    ("store",),
    ("strict", "errors"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
PLUGIN = DATAGEN / "capture" / "sglang_plugin.py"
PLUGIN_FILES = sorted((DATAGEN / "capture").glob("*.py"))  # all of it loads inside SGLang
OPTIONAL = ("isal",)  # the plugin does without: tests/capture/test_spool.py
PLUGIN_TORCH = (PLUGIN, DATAGEN / "capture" / "sglang_proof.py")
HEAVY = (
    "torch", "transformers", "datasets", "gguf", "prefect", "sglang", "pyarrow", "tokenizers", "numba",
)  # fmt: skip
MAX_LINES = 350
HELP_CPU_S = 0.5


@dataclass(frozen=True)
class Import:
    """One import: of `module`, in `file`; lazy when inside a function."""

    file: Path
    line: int
    module: str
    lazy: bool

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module}"

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


@cache
def imports_of(file: Path) -> tuple[Import, ...]:
    """Every import, `from datagen.x import y` as both datagen.x and datagen.x.y."""
    return tuple(_walk(ast.parse(file.read_text(encoding="utf-8")), file, lazy=False))


def _walk(node: ast.AST, file: Path, *, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(file, child.lineno, alias.name, lazy)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{file}:{child.lineno}: a relative import"
            for alias in child.names:
                yield Import(file, child.lineno, f"{child.module}.{alias.name}", lazy)
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from _walk(child, file, lazy=lazy or inside)


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def all_imports(folder: Path) -> list[Import]:
    found = [i for file in files(folder) for i in imports_of(file)]
    assert found, folder
    return found


def room(file: Path) -> str:
    """The layer's name of a file of datagen/."""
    return file.relative_to(DATAGEN).parts[0].removesuffix(".py")


def listed(offenders: list[Import]) -> str:
    return "\n".join(map(str, offenders))


def test_every_room_has_a_layer() -> None:
    rooms = {room(f) for f in files(DATAGEN)} - {"__init__", "__main__"}
    assert rooms <= set(LEVEL), f"unknown rooms: {sorted(rooms - set(LEVEL))}"


def test_imports_go_to_the_same_layer_or_down() -> None:
    offenders = [
        i
        for i in all_imports(DATAGEN)
        if i.top == "datagen"
        and "." in i.module
        and LEVEL[i.module.split(".")[1]] < LEVEL[room(i.file)]
    ]
    assert not offenders, listed(offenders)


def test_datagen_knows_neither_prefect_nor_the_flows() -> None:
    offenders = [i for i in all_imports(DATAGEN) if i.top in ("prefect", "flows")]
    assert not offenders, listed(offenders)


def test_only_the_plugin_imports_sglang_and_only_inside_its_functions() -> None:
    everywhere = all_imports(DATAGEN) + all_imports(FLOWS)
    offenders = [i for i in everywhere if i.top == "sglang" and not (i.file == PLUGIN and i.lazy)]
    assert not offenders, listed(offenders)


def test_the_plugin_loads_where_nothing_of_ours_is_installed() -> None:
    assert PLUGIN in PLUGIN_FILES
    allowed = {*sys.stdlib_module_names, "torch", "safetensors", "sglang", *OPTIONAL}
    ours = {"datagen.capture"}
    offenders = [
        i
        for file in PLUGIN_FILES
        for i in imports_of(file)
        if i.top not in allowed and ".".join(i.module.split(".")[:2]) not in ours
    ]
    assert not offenders, listed(offenders)


@pytest.mark.parametrize("package", ["__init__.py", "capture/__init__.py"])
def test_packages_on_the_plugins_path_import_nothing(package: str) -> None:
    assert not imports_of(DATAGEN / package)


def test_the_spool_needs_the_standard_library_and_numpy_alone() -> None:
    allowed = {*sys.stdlib_module_names, "numpy", "datagen", *OPTIONAL}
    offenders = [i for i in imports_of(DATAGEN / "capture" / "spool.py") if i.top not in allowed]
    assert not offenders, listed(offenders)


def test_torch_stays_in_its_rooms() -> None:
    rooms = ("embedded", "drafter", "export")  # two trainers read what torch.save writes
    single = (*PLUGIN_TORCH, *(DATAGEN / "acceptance" / n for n in ("replay.py", "expected.py")))
    offenders = [
        i
        for i in all_imports(DATAGEN) + all_imports(FLOWS)
        if i.top == "torch"
        and i.file not in single
        and not (i.file.is_relative_to(DATAGEN) and room(i.file) in rooms)
    ]
    assert not offenders, listed(offenders)


def test_transformers_is_imported_in_functions_of_two_places_only() -> None:
    tokens = DATAGEN / "target" / "tokens.py"
    offenders = [
        i
        for i in all_imports(DATAGEN) + all_imports(FLOWS)
        if i.top == "transformers"
        and not (i.lazy and (i.file == tokens or i.file.is_relative_to(DATAGEN / "embedded")))
    ]
    assert not offenders, listed(offenders)


def test_numba_is_loaded_by_whoever_first_needs_a_compiled_loop() -> None:
    kernels = DATAGEN / "store" / "kernels.py"
    offenders = [
        i
        for i in all_imports(DATAGEN) + all_imports(FLOWS)
        if (i.top == "numba" and i.file != kernels)
        or (i.module.startswith("datagen.store.kernels") and not i.lazy)
    ]
    assert not offenders, listed(offenders)


def test_the_store_does_not_know_who_made_the_rows() -> None:
    allowed = {"store", "strict", "errors"}
    offenders = [
        i
        for i in all_imports(DATAGEN / "store")
        if i.top == "datagen" and i.module.split(".")[1] not in allowed
    ]
    assert not offenders, listed(offenders)


def test_nobody_writes_utils() -> None:
    vague = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py", "manager.py"}
    assert not [f for folder in (DATAGEN, FLOWS) for f in files(folder) if f.name in vague]


def test_files_stay_short() -> None:
    lengths = {
        f: len(f.read_text(encoding="utf-8").splitlines())
        for folder in (DATAGEN, FLOWS)
        for f in files(folder)
    }
    long = {str(f.relative_to(ROOT)): n for f, n in lengths.items() if n > MAX_LINES}
    assert not long, f"over {MAX_LINES} lines; aim for under 300: {long}"


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, time\n"
        "from datagen.cli.app import app\n"
        "import datagen.cli\n"
        "from typer.main import get_command\n"
        "get_command(app)\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], time.process_time())"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout.split()
        for _ in range(3)
    ]
    assert {o[0] for o in outputs} == {"[]"}, outputs
    assert min(float(o[-1]) for o in outputs) < HELP_CPU_S, outputs
