"""The command ``p2pdpt``."""
