"""Arithmetic on flat arrays: folds and copies, in C where it is compiled, else in numpy.

Both give the same bits. ``P2PDPT_NATIVE`` chooses: ``auto`` (C if it imports), ``require`` (an
error without it), ``off`` (numpy).
"""
