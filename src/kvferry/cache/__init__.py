"""Keys, slots, leases, pins and quotas of each tier, and which blocks are evicted.

This package moves no bytes, starts no thread and calls nothing in a package above it: pools append
events to a log instead.
"""
