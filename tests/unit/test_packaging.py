"""What is built from the tree: one top-level package with everything in it, from the tree and from its sdist alike."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_SOURCE = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", "tests")
BUILD = "import sys, setuptools.build_meta as b; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"


def build(kind: str, tree: Path, into: Path) -> Path:
    """Runs the build backend as pip does, without a network."""
    into.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(into)], cwd=tree, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return into / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A wheel built from a copy of the tree, and one built from its sdist."""
    work = tmp_path_factory.mktemp("built")
    tree = work / "tree"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=NOT_SOURCE)
    sdist = build("sdist", tree, work / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "unpacked", filter="data")
    [unpacked] = (work / "unpacked").iterdir()
    return build("wheel", tree, work / "from_tree"), build("wheel", unpacked, work / "from_sdist")


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_there_is_one_top_level_package(built: tuple[Path, Path]) -> None:
    tops = {name.split("/")[0] for name in names(built[0])}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"stagemesh"}


def test_every_module_is_in_with_the_generated_code_and_the_type_marker(built: tuple[Path, Path]) -> None:
    sources = {
        f"stagemesh/{path.relative_to(ROOT)}"
        for folder in ("shared", "services")
        for path in (ROOT / folder).rglob("*.py*")
        if path.suffix in (".py", ".pyi")
    }
    assert any(name.endswith("_pb2.py") for name in sources)
    assert any(name.endswith("_pb2.pyi") for name in sources)
    packed = {name for name in names(built[0]) if ".dist-info/" not in name}
    assert packed == sources | {"stagemesh/__init__.py", "stagemesh/py.typed"}


def test_the_sdist_builds_the_same_wheel(built: tuple[Path, Path]) -> None:
    assert names(built[0]) == names(built[1])


def test_the_wheel_works_on_its_own(built: tuple[Path, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(built[0]) as archive:
        archive.extractall(tmp_path)
    [entry_points] = tmp_path.glob("*.dist-info/entry_points.txt")
    assert "stagemesh = stagemesh.shared.cli.main:main" in entry_points.read_text()
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = ['stagemesh', '--help'];"
        "from stagemesh.shared.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "prefill" in done.stdout
