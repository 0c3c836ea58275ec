"""What is built is what is on disk, under one name, with nothing of one machine in it."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import graphopt

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "Makefile", ROOT / "setup.cfg"]
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|mnt|opt|root|srv|tmp|usr|Users|var|work)/[\w.-]+")


def on_disk() -> set[str]:
    """Files of the package, seen through its two symbolic links."""
    return {
        os.path.relpath(Path(folder, name), ROOT)
        for folder, _, names in os.walk(ROOT / "graphopt", followlinks=True)
        for name in names
        if "__pycache__" not in folder and not Path(folder, name).is_symlink()
    }


def build(source: Path, target: Path, *kinds: str) -> None:
    """Build distributions with the setuptools that is installed, so that no network is needed."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), *kinds]
    result = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `direct/*.whl`, built from a checkout, `sdist/*.tar.gz`, and `sdist/*.whl`,
    built from that archive. The checkout is a copy, since building leaves files behind."""
    folder = tmp_path_factory.mktemp("packaging")
    leave_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
    checkout = shutil.copytree(ROOT, folder / "checkout", symlinks=True, ignore=leave_out)
    build(checkout, folder / "direct", "--wheel")
    build(checkout, folder / "sdist")
    return folder


def wheel_in(folder: Path) -> zipfile.ZipFile:
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.mark.parametrize("way", ["direct", "sdist"])
def test_wheel_is_what_is_on_disk(built: Path, way: str) -> None:
    with wheel_in(built / way) as wheel:
        files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert files == on_disk()
    assert {"graphopt/passes/__init__.py", "graphopt/lowering/__init__.py"} <= files


def test_nothing_generic_at_the_top_level(built: Path) -> None:
    with wheel_in(built / "direct") as wheel:
        tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert tops == {"graphopt", f"graphopt-{graphopt.__version__}.dist-info"}


def test_metadata(built: Path) -> None:
    information = f"graphopt-{graphopt.__version__}.dist-info"
    with wheel_in(built / "direct") as wheel:
        metadata = Parser().parsestr(wheel.read(f"{information}/METADATA").decode())
        scripts = configparser.ConfigParser()
        scripts.read_string(wheel.read(f"{information}/entry_points.txt").decode())
        assert f"{information}/licenses/LICENSE" in wheel.namelist()
    assert metadata["Version"] == graphopt.__version__
    assert metadata["Requires-Python"] == ">=3.10"
    assert set(metadata.get_all("Provides-Extra", [])) == {"test", "bench", "triton", "docs"}
    assert dict(scripts["console_scripts"]) == {"graphopt": "graphopt.cli:app"}


def test_wheel_runs_where_there_is_no_checkout(built: Path, tmp_path: Path) -> None:
    with wheel_in(built / "sdist") as wheel:
        wheel.extractall(tmp_path)
    program = "import graphopt.passes, graphopt.lowering; print(graphopt.passes.__file__)"
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout.strip() == str(tmp_path / "graphopt/passes/__init__.py"), result.stderr


def test_source_archive_has_no_links(built: Path) -> None:
    """Links would be lost where an archive is unpacked on a system that has none."""
    (path,) = (built / "sdist").glob("*.tar.gz")
    with tarfile.open(path) as archive:
        assert [member.name for member in archive if member.islnk() or member.issym()] == []


@pytest.mark.parametrize("name", ["passes", "lowering"])
def test_links_are_relative(name: str) -> None:
    assert os.readlink(ROOT / "graphopt" / name) == f"../{name}"


def test_pins_satisfy_what_is_required() -> None:
    """Continuous integration installs known versions of everything that is asked for."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    required = [
        settings["options"]["install_requires"],
        *settings["options.extras_require"].values(),
    ]
    lines = [line for text in required for line in text.splitlines() if line.strip()]
    names = {re.split(r"[<>=!~ ]", line)[0] for line in lines if not line.startswith("#")}
    pins = re.findall(r"^([\w-]+)==[\w.]+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert names <= set(pins)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_no_machine_path(path: Path) -> None:
    assert MACHINE_PATH.findall(path.read_text()) == []
