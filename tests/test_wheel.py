"""The wheel: built once, it runs the README's example where there is no compiler."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from evidence import PROVES

ROOT = Path(__file__).resolve().parents[1]
PACKAGED = ("monitor", "configs", "pyproject.toml", "setup.py", "README.md", "LICENSE")
SOURCES = ("monitor/stats/host_kernel.c", "monitor/sinks/lines.c", "monitor/pytorch/fast_path.c")
NATIVE = ("monitor.stats._host_kernel", "monitor.sinks._lines")

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """The output of a command, without what the surroundings would have it import or record."""
    unwanted = ("PYTHONPATH", "MONITOR_OUTPUT_DIR", "MONITOR_NATIVE")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    done = subprocess.run(command, cwd=cwd, env=environment | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of ``text`` in ``language``."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def build(folder: Path, **variables: str) -> Path:
    """A wheel of the sources as they are, without what was built of them."""
    sources = folder / "sources"
    left_out = shutil.ignore_patterns("__pycache__", "*.so", "*.pyc")
    for name in PACKAGED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, sources / name, ignore=left_out)
        else:
            shutil.copy(ROOT / name, sources / name)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, cwd=sources, **variables)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """A virtual environment with nothing of its own but the wheel; behind it stand the libraries that run this test. Returns
    its folder of programs.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=wheel.parent)
    programs = folder / "bin"
    pip = (sys.executable, "-m", "pip", "--python", programs / "python", "--quiet", "--disable-pip-version-check")
    run(*pip, "install", "--no-index", "--no-deps", wheel, cwd=wheel.parent, CC="/bin/false")
    (own,) = folder.glob("lib/python*/site-packages")
    libraries = [path for path in sys.path if path.endswith("site-packages")]  # of two environments, where one is over another
    (own / "libraries.pth").write_text("\n".join(libraries) + "\n")
    return programs


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(wheel, tmp_path_factory.mktemp("bare") / "environment")


def folders_without_compiler(programs: Path) -> dict[str, str]:
    return {"PATH": str(programs), "CC": "/bin/false"}


@needs_compiler
def test_its_name_says_that_every_python_from_3_11_on_can_use_it(wheel: Path) -> None:
    assert "-cp311-abi3-" in wheel.name


@needs_compiler
def test_its_modules_in_c_are_there_without_a_framework(programs: Path, tmp_path: Path) -> None:
    without = "import sys; sys.modules |= dict.fromkeys(('torch', 'mindspore'))"
    imports = f"import {', '.join(NATIVE)}; print({', '.join(f'{name}.__file__' for name in NATIVE)}, sep='\\n')"
    found = run(programs / "python", "-c", f"{without}\n{imports}", cwd=tmp_path, **folders_without_compiler(programs))
    files = [Path(line) for line in found.splitlines()]
    assert [path.name for path in files] == ["_host_kernel.abi3.so", "_lines.abi3.so"]
    assert all(path.is_relative_to(programs.parent) for path in files)


@needs_compiler
def test_beside_torch_ordinary_tensors_are_recorded_in_c(programs: Path, tmp_path: Path) -> None:
    asked = "from monitor.pytorch import fast_path; print(fast_path.IN_C, fast_path._fast_path.__file__)"
    printed = run(programs / "python", "-c", asked, cwd=tmp_path, **folders_without_compiler(programs))
    used, file = printed.split()
    assert used == "True"
    assert Path(file).is_relative_to(programs.parent)


@needs_compiler
def test_presets_come_with_it(programs: Path, tmp_path: Path) -> None:
    asked = "from monitor.attaching import preset_fields; print(preset_fields('health')['format'])"
    assert run(programs / "python", "-c", asked, cwd=tmp_path, **folders_without_compiler(programs)) == "parquet\n"


@needs_compiler
def test_a_command_is_run_with_its_own_sitecustomize(programs: Path, tmp_path: Path) -> None:
    asked = "import sitecustomize; print(sitecustomize.__file__)"
    command = (programs / "monitor-run", programs / "python", "-c", asked)
    printed = run(*command, cwd=tmp_path, **folders_without_compiler(programs))
    assert Path(printed.strip()).match("monitor/launching/site/sitecustomize.py")
    assert Path(printed.strip()).is_relative_to(programs.parent)


@needs_compiler
def test_it_runs_the_example_of_the_readme_without_a_compiler(programs: Path, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (tmp_path / "monitor_config.json").write_text(blocks(readme, "json")[0])
    train, read = blocks(readme, "python")[:2]
    (tmp_path / "train.py").write_text(train)
    (tmp_path / "read.py").write_text(read)
    variables = folders_without_compiler(programs)
    for script in ("train.py", "read.py"):
        printed = run(programs / "python", script, cwd=tmp_path, **variables)
    assert [int(line.split()[0]) for line in printed.splitlines()] == [step for step in range(10) for _ in range(4)]
    run(programs / "monitor-merge", "monitor_output", cwd=tmp_path, **variables)
    assert (tmp_path / "monitor_output" / "merged" / "global" / "grad_reduced_0-9.parquet").exists()
    command = (programs / "monitor-report", "monitor_output/merged", "--json", "-o", "report.html")
    assert json.loads(run(*command, cwd=tmp_path, **variables))["state"] == "healthy"
    assert "uPlot" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.skipif(not PROVES, reason="it builds a second wheel: make prove runs it")
def test_built_without_a_compiler_it_holds_the_same_modules_in_python_only(tmp_path: Path) -> None:
    wheel = build(tmp_path, CC="/bin/false")
    programs = install(wheel, tmp_path / "environment")
    asked = (
        "from monitor.stats.host.array_kernel import native_kernel; from monitor.sinks.csv import is_native; "
        "from monitor.pytorch.fast_path import IN_C"
    )
    printed = run(programs / "python", "-c", f"{asked}; print(native_kernel(0.0), is_native(), IN_C)", cwd=tmp_path)
    assert printed.split() == ["None", "False", "False"]


@needs_compiler
@pytest.mark.parametrize("source", SOURCES)
def test_compilers_have_no_warning_about_it(source: str) -> None:
    """For the stable ABI, and for the ABI of one version."""
    include = f"-I{sysconfig.get_path('include')}"
    for limited in (["-DPy_LIMITED_API=0x030B0000"], []):
        run("cc", "-std=c11", "-Wall", "-Wextra", "-Werror", *limited, include, "-fsyntax-only", source, cwd=ROOT)
