"""Traces through the real pool and the real policies, without bytes: what each would have hit."""
