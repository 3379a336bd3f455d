"""Child processes of the engine: their start and end, messages, and memory shared with it.

The package knows nothing of drives or shared stores, and keeps no state of a tier.
"""
