"""Eviction order only: what goes first. The pool decides what may go at all."""

from kvferry.policy.base import EvictionOrder
from kvferry.policy.lru import LruOrder

__all__ = ["EvictionOrder", "LruOrder"]
