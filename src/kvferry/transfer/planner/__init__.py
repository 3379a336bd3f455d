"""Which path for which transfer: measured on this machine, kept, and explained.

Owns the profile and the choice; copies nothing while the engine runs.
"""
