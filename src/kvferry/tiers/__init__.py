"""Tiers below host memory: the contract, memory, disk, shared stores, and their child processes.

Owns how bytes go down, come up and are found; which blocks go where, and when, is left to
``scheduler``.
"""
