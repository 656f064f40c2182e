"""Virtual environments with exactly the requirements of optkit's wheel, made in a second without downloads.

Installing torch again for each set of extras would take minutes and gigabytes. Here the distributions are links to
the running environment: the closure of the wheel's requirements by metadata, and nothing else. An import of any other
package fails, as in a user's environment.
"""

from __future__ import annotations

import csv
import functools
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

from packaging.metadata import parse_email
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "optkit/kernels/cpu/_native.so"


# -- the wheel ---------------------------------------------------------------------------------------------


def build_wheel(folder: Path) -> Path:
    """The wheel of the source tree, with the already built native library."""
    tree = folder / "tree"
    ignored = shutil.ignore_patterns(".*", "*.so", "__pycache__", "build", "dist", "*.egg-info")
    made = str(ROOT / "artifact")  # by the demo; the package optkit/artifact has the same name
    shutil.copytree(
        ROOT, tree, ignore=lambda at, names: {*ignored(at, names), *(n for n in names if f"{at}/{n}" == made)}
    )
    platform = sysconfig.get_platform()
    name = f"lib.{platform}-{sys.implementation.cache_tag}"  # where build_ext looks for what is up to date
    library = tree / "build" / name / LIBRARY
    library.parent.mkdir(parents=True)
    shutil.copyfile(ROOT / "kernels" / "ops" / "cpu" / "_native.so", library)
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", str(folder / "dist")]
    subprocess.run(command, cwd=tree, check=True, capture_output=True, timeout=600)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


# -- the environment ---------------------------------------------------------------------------------------


def make_environment(folder: Path, wheel: Path, extra: str = "") -> Path:
    """A virtual environment with ``wheel`` installed by pip, and links to the requirements of the wheel with ``extra``.

    Returns:
        the environment's ``bin``.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=300)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True, timeout=300)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (metadata,) = packages.glob("optkit-*.dist-info/METADATA")
    listed = parse_email(metadata.read_bytes())[0]["requires_dist"]
    link(closure(map(Requirement, listed), extra), packages)
    return folder / "bin"


def closure(requirements: Iterable[Requirement], extra: str) -> dict[str, Distribution]:
    """The distributions required by ``requirements`` on the current platform, by name."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(requirement, extra) for requirement in requirements]
    while waiting:
        requirement, asked = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": asked}):
            continue
        name = canonicalize_name(requirement.name)
        found[name] = distribution(name)
        for further in {"", *requirement.extras}:
            if (name, further) not in seen:
                seen.add((name, further))
                waiting += [(Requirement(text), further) for text in found[name].requires or ()]
    return found


def link(wanted: dict[str, Distribution], packages: Path) -> None:
    """Link the files of ``wanted`` into ``packages``; a folder of a single distribution is linked as a whole."""
    for one in wanted.values():
        paths = recorded(one)
        for top in {path.partition("/")[0] for path in paths} - {".."}:
            whole = len(owners()[top]) == 1
            for path in [top] if whole else [path for path in paths if path.partition("/")[0] == top]:
                link_once(Path(str(one.locate_file(path))), packages / path)


def link_once(source: Path, place: Path) -> None:
    if source.exists() and not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        os.symlink(source, place)


@functools.cache
def owners() -> dict[str, set[str]]:
    """The distributions with files under each top-level name."""
    found: dict[str, set[str]] = {}
    for one in distributions():
        name = canonicalize_name(one.metadata["Name"])
        for top in {path.partition("/")[0] for path in recorded(one)}:
            found.setdefault(top, set()).add(name)
    return found


def recorded(one: Distribution) -> list[str]:
    """The paths of the installed files, by RECORD. ``Distribution.files`` has an object a file, 20 s for all."""
    return [row[0] for row in csv.reader((one.read_text("RECORD") or "").splitlines()) if row]


def linked_names(packages: Path) -> Iterator[str]:
    """The names of the distributions in ``packages``."""
    for folder in packages.glob("*.dist-info"):
        yield canonicalize_name(folder.name.removesuffix(".dist-info").rpartition("-")[0])
