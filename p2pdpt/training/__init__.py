"""Training with torch: sessions, and what they are made of."""

from __future__ import annotations

from p2pdpt.training.sessions import Session, session

__all__ = ["Session", "session"]
