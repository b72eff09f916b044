"""Where nodes learn of each other; registered in the group ``p2pdpt.discovery``."""
