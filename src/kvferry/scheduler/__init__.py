"""The scheduler half: what moves, when, and what became of it. Never touches a byte."""
