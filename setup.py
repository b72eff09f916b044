"""Build the compiled modules of ``cffi_build/``; everything else is in ``pyproject.toml``.

``P2PDPT_NATIVE`` chooses: ``auto`` (the default: without a working compiler the result is a pure
Python package, which works), ``require`` (a failing compile fails the build) or ``off``.
"""

from setuptools import setup

setup()
