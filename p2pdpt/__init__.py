"""Train a PyTorch model on many machines with no master."""
