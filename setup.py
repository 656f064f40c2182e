"""The native CPU kernels: one shared object with a plain C ABI, loaded by ctypes (kernels/ops/cpu/native.py).

Everything else about the package is in pyproject.toml. ``optional``: without a C++ compiler optkit installs and
runs without these kernels, with a warning. No ``-march=native``: each instruction set is a set of functions with a
target attribute, and the one to call is chosen at run time, so one binary runs everywhere. ``-ffp-contract=off``:
the bits must not depend on which of them it is.

No Python is in the library, so one wheel serves every Python of a platform: ``py3-none-PLATFORM``.
"""

import os
from glob import glob

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = "kernels/ops/cpu"
FLAGS = ["-O3", "-g0", "-std=c++17", "-pthread", "-ffp-contract=off", "-fvisibility=hidden"]


class BuildLibrary(build_ext):
    """Gives the library a name without a Python version."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"


class PlatformWheel(bdist_wheel):
    """Tags the wheel for every Python 3 of this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
    ext_modules=[
        Extension(
            "optkit.kernels.cpu._native",
            sources=sorted(glob(f"{FOLDER}/*.cpp")),
            depends=sorted(glob(f"{FOLDER}/*.h")),
            language="c++",
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            optional=True,
        )
    ],
)
