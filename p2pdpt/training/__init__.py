"""Training with PyTorch: sessions, hooks, buckets. Nothing outside imports torch."""
