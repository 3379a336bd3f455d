"""What every other package builds on: keys, identity, quantities, lifecycle.

Owns no blocks, no bytes and no settings; imports nothing of kvferry but errors and types.
"""
