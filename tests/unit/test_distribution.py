"""The wheel: exactly our three packages, names nobody else installed, nothing left behind."""

import shutil
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parent.parent.parent
PACKAGES = {"services", "common", "router"}


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Paths inside a wheel that is built from a copy of the tree, without the network."""
    root = tmp_path_factory.mktemp("tree")
    for name in (*PACKAGES, "tests", "benchmarks"):
        ignore = shutil.ignore_patterns("__pycache__", "data")
        shutil.copytree(ROOT / name, root / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", root)
    (root / "README.md").write_text("Its words do not matter here.")
    (wheel,) = WheelBuilder(str(root)).build(directory=str(root / "dist"), versions=["standard"])
    return zipfile.ZipFile(wheel).namelist()


def test_wheel_has_exactly_our_three_top_level_names(shipped: list[str]) -> None:
    tops = {name.partition("/")[0] for name in shipped}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES


def test_wheel_has_every_module_and_every_folder_is_a_package(shipped: list[str]) -> None:
    modules = {str(p.relative_to(ROOT)) for name in PACKAGES for p in (ROOT / name).rglob("*.py")}
    assert {name for name in shipped if name.endswith(".py")} == modules
    folders = {str(Path(module).parent) for module in modules}
    assert {f"{folder}/__init__.py" for folder in folders} <= modules


def test_no_other_installed_distribution_provides_our_names() -> None:
    provided = packages_distributions()
    others = {name: set(provided.get(name, ())) - {"baton"} for name in PACKAGES}
    assert others == {name: set() for name in PACKAGES}
