"""kvferry's disk and shared stores as a storage back end of SGLang's HiCache.

Owns the translation of HiCache's interface; the tiers are the same as for every other engine.
"""
