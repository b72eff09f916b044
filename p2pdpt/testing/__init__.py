"""Simulator and conformance kits, for our own tests and for those of plugins."""
