"""Tiers below host memory: the contract, memory, disk, shared stores, and their child processes.

Owns how blocks are written to, read from and looked up in a tier. Leaves which blocks move, and
when, to ``scheduler``.
"""
