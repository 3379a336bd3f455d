"""Eviction policies and their contract, admission, and the choice between loading and computing.

Pools own slots, claims and pins; a policy only orders cached blocks.
"""
