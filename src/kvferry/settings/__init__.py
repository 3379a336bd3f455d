"""Readers of settings: sizes, paths, tiers, stores, policies, tenants, files and the environment.

Owns what a value may look like and what a refusal says; the table of settings is
``kvferry.config``, and acting on a value is left to the packages that use it.
"""
