"""What importing costs and what it may bring along. Each check runs in a fresh interpreter."""

from __future__ import annotations

import ast
import json
import statistics
import subprocess
import sys
from pathlib import Path

import headstart

PACKAGE = Path(headstart.__file__).parent
DATA_TOWER = (
    "ops",
    "layers",
    "quant",
    "models",
    "kv",
    "worker",
    "executor.local",
    "replica",
    "calibrate",
    "kernel_bench",
    "llm",
)


def run_fresh(code: str) -> str:
    """Standard output of `code` in a new interpreter that sees the same packages."""
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {[str(PACKAGE.parent)]!r}\n{code}"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def modules(*, without: tuple[str, ...] = ()) -> list[str]:
    """Dotted names of the package's modules, but for those below a name in `without`."""
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if not any(name == other or name.startswith(f"{other}.") for other in (*without, "__main__")):
            names.append(f"headstart.{name}".rstrip("."))
    return names


def test_the_control_tower_never_loads_torch() -> None:
    names = modules(without=DATA_TOWER)
    assert {"headstart.core.scheduler", "headstart.engine.async_engine", "headstart.cli.serve"} <= set(names)
    code = (
        "from importlib import import_module\n"
        f"for name in {names!r}: import_module(name)\n"
        "import json; print(json.dumps(sorted({module.split('.')[0] for module in sys.modules})))"
    )
    loaded = set(json.loads(run_fresh(code)))
    assert not loaded & {"torch", "transformers"}


def test_the_core_is_standard_library_only() -> None:
    names = [name for name in modules() if name.startswith("headstart.core")]
    code = (
        "import json\n"
        "from importlib import import_module\n"
        "before = set(sys.modules)\n"
        f"for name in {names!r}: import_module(name)\n"
        "print(json.dumps(sorted({module.split('.')[0] for module in set(sys.modules) - before})))"
    )
    outside = set(json.loads(run_fresh(code))) - set(sys.stdlib_module_names) - {"headstart"}
    assert not outside


def test_importing_the_package_is_cheap() -> None:
    code = "from time import perf_counter as now; t = now(); import headstart; print(now() - t)"
    seconds = statistics.median(float(run_fresh(code)) for _ in range(5))
    assert seconds < 0.150
    assert "headstart.core" not in run_fresh("import headstart; print(*sys.modules)").split()


def test_the_public_names_are_loaded_when_asked_for() -> None:
    out = run_fresh("import headstart; print(headstart.SamplingParams.__module__, headstart.LLM.__module__)")
    assert out.split() == ["headstart.core.request", "headstart.llm"]
    assert set(headstart.__all__) == {"LLM", "SamplingParams", "__version__"}


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    assert not hasattr(headstart, "nothing_of_the_kind")


def test_the_version_is_the_one_of_the_distribution() -> None:
    text = (PACKAGE.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{headstart.__version__}"' in text


def test_every_package_and_module_says_what_it_owns() -> None:
    bare = [path for path in PACKAGE.rglob("*.py") if not (ast.get_docstring(ast.parse(path.read_text())) or "")]
    assert not bare
    todo = [path for path in PACKAGE.rglob("*.py") if "TODO" in path.read_text(encoding="utf-8")]
    assert not todo
