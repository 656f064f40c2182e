"""The native CPU kernels: one shared object with a plain C ABI, loaded by ctypes (kernels/ops/cpu/native.py).

Everything else about the package is in pyproject.toml. ``optional``: without a C++ compiler optkit installs and
runs without these kernels. No ``-march=native``: each instruction set is a set of functions with a target
attribute, and the one to call is chosen at run time, so one binary runs everywhere. ``-ffp-contract=off``: the
bits must not depend on which of them it is.
"""

from glob import glob

from setuptools import Extension, setup

FOLDER = "kernels/ops/cpu"
FLAGS = ["-O3", "-g0", "-std=c++17", "-fopenmp", "-ffp-contract=off", "-fvisibility=hidden"]

setup(
    ext_modules=[
        Extension(
            "optkit.kernels.cpu._native",
            sources=sorted(glob(f"{FOLDER}/*.cpp")),
            depends=sorted(glob(f"{FOLDER}/*.h")),
            language="c++",
            extra_compile_args=FLAGS,
            extra_link_args=["-fopenmp"],
            optional=True,
        )
    ]
)
