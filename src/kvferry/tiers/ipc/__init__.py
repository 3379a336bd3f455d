"""Child processes of the engine: how they start, talk, share memory with it, and end.

The package knows nothing of drives or shared stores, and keeps no state of a tier.
"""
