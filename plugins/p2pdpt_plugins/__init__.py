"""The built-in topologies, registered as those of third parties are."""
