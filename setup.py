"""Build the compiled modules of ``cffi_build/``; everything else is in ``pyproject.toml``.

``P2PDPT_NATIVE`` chooses: ``auto`` (the default: where nothing compiles, the result is a pure
Python package, which works), ``require`` (a failing compile fails the build) or ``off``.
"""

from __future__ import annotations

import os
import runpy
import sysconfig
import warnings
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

MODE = os.environ.get("P2PDPT_NATIVE", "auto")
BUILDERS = ["cffi_build/build_kernels.py"]
ADVICE = (
    "Install a C compiler and the headers of Python (Debian: apt install gcc python3-dev), "
    "or build with P2PDPT_NATIVE=off."
)

if MODE not in ("auto", "require", "off"):
    raise SystemExit(f"P2PDPT_NATIVE={MODE!r}: choose auto, require or off")


def extensions() -> list[Extension]:
    """Generate the C source of each builder's module, and return what to compile."""
    if MODE == "off":
        return []
    generated = Path("cffi_build/generated")
    generated.mkdir(exist_ok=True)
    try:
        return [
            runpy.run_path(builder)["ffibuilder"].distutils_extension(str(generated))
            for builder in BUILDERS
        ]
    except ImportError as error:
        give_up(error)
        return []


def give_up(error: Exception) -> None:
    """Fail the build where the compiled modules are required, else say what is lost."""
    if MODE == "require":
        raise SystemExit(f"P2PDPT_NATIVE=require, but nothing compiles: {error}\n{ADVICE}")
    warnings.warn(
        f"p2pdpt is built without its compiled kernels, and will use numpy: {error}\n{ADVICE}",
        stacklevel=1,
    )


class BuildNative(build_ext):
    """Compile, or turn the build into that of a pure package."""

    def run(self) -> None:
        """Build every extension, all or none."""
        try:
            super().run()
        # The compilers' errors have no common class but this, and any of them means the same.
        except Exception as error:
            give_up(error)
            for output in self.get_outputs():
                Path(output).unlink(missing_ok=True)
            self.extensions = self.distribution.ext_modules = []
            # Decided before the build began, by whether there is anything to compile.
            wheel = self.distribution.get_command_obj("bdist_wheel", create=False)
            if wheel is not None:
                wheel.root_is_pure = True


limited = not sysconfig.get_config_var("Py_GIL_DISABLED")
setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildNative},
    # One wheel serves every later Python: cffi's modules keep to the stable ABI.
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if limited else {},
)
