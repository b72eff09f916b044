"""The built-in transports, registered as those of third parties are."""
