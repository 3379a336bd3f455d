"""Keys, slots, leases, pins and quotas of each tier, and which blocks are evicted.

This package moves no bytes, starts no thread and calls nothing above it: pools append what happens
to an event log.
"""
