"""Blocks on disk: one store per directory and rank, bounded, checked, whole after a crash."""
