"""What runs a topology's coroutine on a node."""
