"""Bulk over TCP."""
