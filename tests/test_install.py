"""The wheel, installed into fresh environments: what a user gets who has no more than what it declares.

``OPTKIT_WHEEL`` names a wheel to test; without it one is made of this tree, with the library that is built here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from optkit.kernels.cpu import native
from tests.support.linked_environment import LIBRARY, build_wheel, linked_names, make_environment
from tests.support.model_directory import save_model

pytestmark = pytest.mark.skipif(
    "OPTKIT_WHEEL" not in os.environ and not native.available(), reason=str(native.missing_reason())
)
RECIPE = """\
schema_version: 1
name: small
workload: {prompt_tokens: [16], output_tokens: 2, batch: 1}
runtime: {block_size: 8, max_num_batched_tokens: 32, kv_cache_bytes: 1MiB}
passes: {fuse_qkv: {}, int8: {}}
"""
# One process for all of them, because importing torch takes longer than each of them. The ceilings of the machine and
# the pauses of measurements are not what is tested.
COMMANDS = """
import json, sys
from optkit.machine import logs, target
logs.silence_progress_bars()
from optkit.evaluation import kernel_times, speed
from optkit.pipeline import objective
from optkit.cli.main import run
speed.SETTLE_SECONDS, kernel_times.REPEATS, objective.TOLERANCE = 0, 1, float("inf")
ceilings = target.Target(name="cpu", kind="cpu", isa=("avx2",), cores=1, memory_bytes=2**34, fp32_flops=1e11,
    int8_ops=2e11, bf16_flops=1e11, fp8_flops=0.0, memory_bandwidth=2e10, source="datasheet")
target.detect = lambda refresh=False: ceilings
codes = {}
for words in json.load(sys.stdin):
    codes[" ".join(words[:2])] = run(words)
    sys.stdout.flush()
print("codes " + json.dumps(codes))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("OPTKIT_WHEEL")
    return Path(given).resolve() if given else build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "small.yaml").write_text(RECIPE)
    return save_model(folder / "tiny")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory and a cache apart from everything else."""
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    for name in ("PYTHONPATH", "TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "work").mkdir()
    yield tmp_path / "work"


def start(command: list[str], work: Path, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=work, input=text, capture_output=True, text=True, timeout=600, check=False
    )


def first_steps(model: Path) -> list[list[str]]:
    recipe = str(model.parent / "small.yaml")
    return [
        ["doctor", "--json"],
        ["recipe", "check", recipe],
        ["recipe", "list"],
        ["optimize", "--dry-run", str(model), "-r", recipe],
        ["optimize", str(model), "-r", recipe, "-o", "made", "--quality-tokens", "1024"],
        ["inspect", "made"],
        ["verify", "made"],
        ["export", "made", "--format", "hf", "-o", "exported"],
        ["eval", "made", "--against", str(model), "--tokens", "1024"],
    ]


def assert_first_steps_work(programs: Path, model: Path, work: Path) -> None:
    done = start([str(programs / "python"), "-c", COMMANDS], work, json.dumps(first_steps(model)))
    assert done.returncode == 0, done.stderr[-3000:]
    codes = json.loads(done.stdout.splitlines()[-1].removeprefix("codes "))
    assert set(codes.values()) == {0}, (codes, done.stderr[-3000:])
    assert (work / "made" / "optkit" / "manifest.json").is_file()
    for noise in ("%|", "internal error", "warning:"):
        assert noise not in done.stderr, done.stderr[-3000:]


# -- the wheel ---------------------------------------------------------------------------------------------


def test_the_wheel_is_for_every_python_of_a_platform_and_holds_the_library(wheel: Path) -> None:
    from zipfile import ZipFile

    assert "-py3-none-" in wheel.name and not wheel.name.endswith("-any.whl")
    names = ZipFile(wheel).namelist()
    assert [name for name in names if name.endswith(".so")] == [LIBRARY]
    assert not any(name.startswith(("tests/", "bench/")) for name in names)


def test_a_core_install_can_optimize(wheel: Path, model: Path, work: Path) -> None:
    programs = make_environment(work.parent / "core", wheel)
    packages = next((work.parent / "core" / "lib").glob("python*/site-packages"))
    assert not {"fastapi", "uvicorn", "httpx", "gguf", "accelerate", "pytest"} & set(linked_names(packages))
    assert_first_steps_work(programs, model, work)
    for words in (["serve", "made"], ["bench", "made"]):
        refused = start([str(programs / "optkit"), *words], work)
        assert refused.returncode == 2
        (line,) = refused.stderr.splitlines()
        assert "pip install 'optkit[serve]'" in line


@pytest.mark.soak
def test_a_wheel_without_its_library_warns_and_optimizes(wheel: Path, model: Path, work: Path) -> None:
    programs = make_environment(work.parent / "core", wheel)
    next((work.parent / "core" / "lib").glob(f"python*/site-packages/{LIBRARY}")).unlink()
    recipe = str(model.parent / "small.yaml")
    words = ["optimize", "--dry-run", str(model), "-r", recipe]
    done = start([str(programs / "python"), "-c", COMMANDS], work, json.dumps([words]))
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("warning:")]
    assert "native kernels are missing" in line and "C++ compiler" in line


@pytest.mark.soak
@pytest.mark.parametrize("extra", ["serve", "formats", "structured", "otel", "kv-events"])
def test_an_extra_install_can_optimize(extra: str, wheel: Path, model: Path, work: Path) -> None:
    programs = make_environment(work.parent / extra, wheel, extra)
    assert_first_steps_work(programs, model, work)
    help_text = start([str(programs / "optkit"), "serve", "--help"], work)
    assert help_text.returncode == 0


@pytest.mark.soak
def test_the_registry_gives_what_a_core_install_needs(wheel: Path, model: Path, work: Path) -> None:
    """With downloads, as a user does it; the constraints are those that everything is tested with."""
    folder = work.parent / "fresh"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=300)
    constraints = Path(__file__).resolve().parents[1] / "constraints.txt"
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "-c", str(constraints)]
    subprocess.run([*pip, str(wheel)], check=True, timeout=1800)
    assert_first_steps_work(folder / "bin", model, work)
