"""Connectors put kvferry into inference engines: ``common`` has what every engine needs.

Each other folder translates one engine's hooks; deciding what is cached is the scheduler's job.
"""
