"""Readers of settings: sizes, paths, tiers, stores, policies, tenants, files and the environment.

Owns the forms a value may have and the error messages; leaves the table of settings to
``kvferry.config`` and the use of a value to other packages.
"""
