"""Basics for all other packages: keys, identity, quantities, lifecycle.

Owns no blocks, no bytes and no settings; imports only errors and types from kvferry.
"""
