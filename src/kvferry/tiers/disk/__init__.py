"""The disk tier: stores, their indexes and quotas, drive processes, and the tier itself.

It does not decide which blocks are stored or where, and knows nothing of shared stores.
"""
