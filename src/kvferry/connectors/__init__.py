"""Connectors put kvferry into inference engines: ``common`` has what every engine needs.

Each other folder translates one engine's hooks; the scheduler decides which blocks are cached.
"""
