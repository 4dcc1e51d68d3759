"""What others get: the wheel in an environment of its own, and CMake projects that use the library.

The tests build from INFINITYBATCH_BUILD_DIR (`make test` sets it), whose objects are compiled
already; without it they compile into build/packaging. Those that link it anew in the wheel's layout
are marked `alone`: others start programs from it.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from fault_support import LONG

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("INFINITYBATCH_BUILD_DIR", ROOT / "build" / "packaging"))
WORK = ROOT / "build" / "test-packaging"
CONSUMER = ROOT / "tests" / "consumer"
TORCH = Path(find_spec("torch").origin).parent
JOBS = os.environ.get("JOBS") or str(len(os.sched_getaffinity(0)))


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without what points at the build under test."""
    hidden = (
        "PYTHONPATH",
        "LD_LIBRARY_PATH",
        "TORCH_ROOT",
        "INFINITYBATCH_BINARY",
        "INFINITYBATCH_CLI",
    )
    return {k: v for k, v in os.environ.items() if k not in hidden} | extra


def run(*command, ok: bool = True, **extra: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        env=environment(**extra),
        cwd=WORK,
        check=False,
    )
    output = done.stdout + done.stderr
    assert (done.returncode == 0) == ok, f"{command}\n{output[-4000:]}"
    return output


def cmake_tools() -> list[str]:
    ninja = shutil.which(
        "ninja", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    )
    return ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []


def configure(build: Path, source: Path, *settings: str, ok: bool = True) -> str:
    return run("cmake", "-S", source, "-B", build, *cmake_tools(), *settings, ok=ok)


def build_and_run_consumer(build: Path) -> None:
    run("cmake", "--build", build, "--parallel", JOBS)
    # Empty: neither PATH nor LD_LIBRARY_PATH may be needed to find torch.
    done = subprocess.run([build / "consumer"], capture_output=True, text=True, env={}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ micro-batches, worst relative error", done.stdout)
    loaded = run("ldd", build / "consumer_idle")
    assert "libinfinitybatch.so" in loaded, loaded
    assert "not found" not in loaded


def needed_paths(file: Path) -> list[str]:
    """The run path of an ELF file."""
    found = re.search(r"(?:RUNPATH|RPATH).*\[(.*)\]", run("readelf", "-d", file))
    return found.group(1).split(":") if found else []


@pytest.fixture(scope="session", autouse=True)
def work_folder():
    WORK.mkdir(parents=True, exist_ok=True)


@pytest.fixture(scope="session")
def built(work_folder) -> Path:
    """The build tree in the layout of a plain CMake build."""
    configure(
        BUILD,
        ROOT,
        "-DCMAKE_BUILD_TYPE=Release",
        "-DINFINITYBATCH_WHEEL_LAYOUT=OFF",
        f"-DPython_EXECUTABLE={sys.executable}",
    )
    run(
        "cmake",
        "--build",
        BUILD,
        "--parallel",
        JOBS,
        "--target",
        "infinitybatch",
        "infinitybatch_cli",
        "_C",
    )
    return BUILD


@pytest.fixture(scope="session")
def prefix(built) -> Path:
    folder = WORK / "prefix"
    shutil.rmtree(folder, ignore_errors=True)
    run("cmake", "--install", built, "--prefix", folder, "--component", "infinitybatch")
    return folder


@pytest.fixture(scope="session")
def wheel(prefix) -> Path:
    """Asks for `prefix` only to be built after it: both are installed from one build tree."""
    dist = WORK / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    run(
        sys.executable, "-m", "pip", "wheel", ROOT, "--no-build-isolation", "--no-deps", "--no-index",
        "--wheel-dir", dist, f"--config-settings=build-dir={BUILD}", CMAKE_BUILD_PARALLEL_LEVEL=JOBS,
    )  # fmt: skip
    (file,) = dist.glob("*.whl")
    return file


@pytest.fixture(scope="session")
def installed(wheel) -> Path:
    """A second environment with the wheel in it; torch comes from this one. Returns its Python."""
    folder = WORK / "venv"
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    run(
        sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel
    )
    (site_packages(python) / "torch-of-the-test.pth").write_text(f"{TORCH.parent}\n")
    return python


def site_packages(python: Path) -> Path:
    return Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())


@pytest.mark.alone
def test_wheel_holds_everything_and_no_path_of_the_build_machine(installed):
    package = site_packages(installed) / "infinitybatch"
    for name in (
        "__init__.py", "py.typed", "_build.py", "lib/libinfinitybatch.so", "bin/infinitybatch",
        "include/infinitybatch/infinitybatch.hpp", "share/cmake/infinitybatch/TorchWheel.cmake",
        "share/cmake/infinitybatch/infinitybatch-config.cmake",
    ):  # fmt: skip
        assert (package / name).exists(), name
    # Beside the package, which a Trainer that does not ask for it must not import.
    assert (package.parent / "infinitybatch_lightning.py").exists()
    (extension,) = package.glob("_C.*.so")
    assert needed_paths(extension) == ["$ORIGIN/lib", "$ORIGIN/../torch/lib"]
    assert needed_paths(package / "lib/libinfinitybatch.so") == ["$ORIGIN/../../torch/lib"]
    assert needed_paths(package / "bin/infinitybatch") == [
        "$ORIGIN/../lib",
        "$ORIGIN/../../torch/lib",
    ]
    for file in package.rglob("*"):
        if file.suffix in (".cmake", ".py"):
            assert str(ROOT) not in file.read_text(), file


@pytest.mark.alone
def test_lightning_finds_its_entry_points(installed):
    output = run(
        installed, "-c",
        "import sys\n"
        "from importlib.metadata import entry_points\n"
        "for name in ('lightning.pytorch', 'pytorch_lightning'):\n"
        "    (point,) = entry_points(group=f'{name}.callbacks_factory')\n"
        "    print(point.name, point.load()(), 'infinitybatch' in sys.modules)\n",
    )  # fmt: skip
    assert output == "infinitybatch [] False\n" * 2


@pytest.mark.alone
def test_installed_package_makes_a_step(installed):
    output = run(
        installed, "-c",
        "import torch, infinitybatch as ib\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Linear(8, 3).double()\n"
        "x, y = torch.randn(50, 8).double(), torch.randint(3, (50,))\n"
        "report = ib.VirtualBatch(model, torch.nn.CrossEntropyLoss(), micro_batch_size=7).backward(x, y)\n"
        "native, = torch.autograd.grad(torch.nn.functional.cross_entropy(model(x), y), [model.weight])\n"
        "print(ib.__file__, torch.allclose(model.weight.grad, native, rtol=1e-12, atol=1e-15),\n"
        "      list(report.micro_batch_sizes))\n",
    )  # fmt: skip
    assert f"{site_packages(installed)}/infinitybatch/__init__.py True" in output
    assert "[7, 7, 7, 7, 7, 7, 7, 1]" in output


@pytest.mark.alone
def test_console_script_runs_without_importing_torch(installed):
    script = installed.parent / "infinitybatch"
    assert "doctor" in run(script, "--help")
    imported = run(installed, "-X", "importtime", "-c", "import infinitybatch_cli")
    assert "infinitybatch_cli" in imported
    assert not re.search(r"\| +torch$", imported, re.MULTILINE)
    # Arguments and exit codes pass through unchanged.
    done = subprocess.run(
        [script, "train", "--no-such-flag"],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert done.returncode == 2
    assert "--no-such-flag" in done.stderr


@pytest.mark.alone
def test_the_wheels_name_and_dependency_say_which_torch_it_is_for(wheel, installed):
    minor = ".".join(version("torch").split(".")[:2])
    assert f"+torch{minor}-cp{sys.version_info[0]}{sys.version_info[1]}-" in wheel.name
    required = run(
        installed,
        "-c",
        "from importlib.metadata import requires; print(requires('infinitybatch')[0])",
    )
    assert required.strip() == f"torch=={minor}.*"


@pytest.mark.alone
def test_the_wheel_brings_the_data_of_its_first_command(installed, tmp_path):
    command = [installed.parent / "infinitybatch", "train", "--data", "digits", "--model", "mlp"]
    done = subprocess.run(
        [*command, "--epochs", "1", "--width", "8", "--json"],
        capture_output=True, text=True, env=environment(), check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert '"samples":1438' in done.stdout.replace(" ", "")


@pytest.mark.alone
def test_console_script_without_torch_says_what_to_do(installed):
    link = site_packages(installed) / "torch-of-the-test.pth"
    text = link.read_text()
    link.unlink()
    try:
        output = run(installed.parent / "infinitybatch", "--help", ok=False)
    finally:
        link.write_text(text)
    assert "pip install torch" in output


@pytest.mark.alone
def test_another_minor_version_of_torch_is_refused(installed):
    built = re.search(
        r'TORCH_VERSION = "(.*)"',
        (site_packages(installed) / "infinitybatch/_build.py").read_text(),
    )
    major, minor, _ = built.group(1).split(".")
    other = f"{major}.{int(minor) - 1}.0"
    output = run(
        installed, "-c", f"import torch; torch.__version__ = '{other}'; import infinitybatch", ok=False
    )  # fmt: skip
    assert f"compiled against torch {built.group(1)}, but torch {other} is installed" in output
    assert "pip install" in output


@pytest.mark.alone
def test_find_package_from_a_prefix(prefix):
    build = WORK / "consumer-prefix"
    configure(build, CONSUMER, f"-DCMAKE_PREFIX_PATH={prefix}")
    build_and_run_consumer(build)


@pytest.mark.alone
def test_find_package_from_the_installed_wheel(installed):
    build = WORK / "consumer-wheel"
    prefix = run(installed, "-c", "import infinitybatch as ib; print(ib.cmake_prefix_path)").strip()
    configure(build, CONSUMER, f"-DPython_EXECUTABLE={installed}", f"-DCMAKE_PREFIX_PATH={prefix}")
    build_and_run_consumer(build)


def test_add_subdirectory(work_folder):
    build = WORK / "consumer-subdirectory"
    # Not optimised: this compiles the whole library once more, which takes a tenth of all tests. So
    # `make test` sees that CMake takes it, and `make test-long` that it is built and runs.
    configure(
        build, CONSUMER, f"-DCONSUMER_SUBDIRECTORY={ROOT}", "-DCMAKE_BUILD_TYPE=",
        f"-DPython_EXECUTABLE={sys.executable}",
    )  # fmt: skip
    if LONG:
        build_and_run_consumer(build)


def fake_torch(folder: Path, version: str) -> Path:
    """A folder that looks like torch `version` to CMake."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "include/ATen/core").mkdir(parents=True)
    (folder / "include/ATen/core/TensorBody.h").touch()
    (folder / "include/torch/headeronly").mkdir(parents=True)
    (folder / "include/torch/csrc/api/include").mkdir(parents=True)
    lines = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    (folder / "include/torch/headeronly/version.h").write_text(
        "".join(f"#define TORCH_VERSION_{part} {number}\n" for part, number in lines)
    )
    (folder / "lib").mkdir()
    for name in ("torch", "torch_cpu", "c10"):
        (folder / "lib" / f"lib{name}.so").touch()
    return folder


@pytest.mark.parametrize("version", ["2.10.1", "2.14.0", "3.0.0"])
def test_torch_of_an_unknown_version_is_refused_with_a_way_out(work_folder, version):
    torch = fake_torch(WORK / "torch-fake", version)
    build = WORK / "configure-fake"
    shutil.rmtree(build, ignore_errors=True)
    settings = (
        f"-DTORCH_ROOT={torch}",
        "-DINFINITYBATCH_BUILD_PYTHON=OFF",
        "-DINFINITYBATCH_BUILD_CLI=OFF",
    )
    output = configure(build, ROOT, *settings, "-DINFINITYBATCH_BUILD_TESTS=OFF", ok=False)
    assert version in output
    assert "INFINITYBATCH_ALLOW_UNTESTED_TORCH=ON" in output
    configure(
        build,
        ROOT,
        *settings,
        "-DINFINITYBATCH_BUILD_TESTS=OFF",
        "-DINFINITYBATCH_ALLOW_UNTESTED_TORCH=ON",
    )


@pytest.mark.parametrize("version", ["2.11.0", "2.13.1"])
def test_torch_versions_that_were_checked_are_taken(work_folder, version):
    torch = fake_torch(WORK / "torch-fake", version)
    build = WORK / "configure-fake"
    shutil.rmtree(build, ignore_errors=True)
    output = configure(
        build, ROOT, f"-DTORCH_ROOT={torch}", "-DINFINITYBATCH_BUILD_PYTHON=OFF",
        "-DINFINITYBATCH_BUILD_CLI=OFF", "-DINFINITYBATCH_BUILD_TESTS=OFF",
    )  # fmt: skip
    assert f"torch {version} in {torch}" in output


def test_no_torch_at_all_says_how_to_get_one(work_folder):
    build = WORK / "configure-none"
    shutil.rmtree(build, ignore_errors=True)
    output = configure(build, ROOT, f"-DTORCH_ROOT={WORK / 'nowhere'}", ok=False)
    assert "pip install torch" in output
    assert "TORCH_ROOT" in output
