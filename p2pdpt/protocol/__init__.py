"""Decide: the protocols of p2pdpt without a socket, a task or a clock."""
