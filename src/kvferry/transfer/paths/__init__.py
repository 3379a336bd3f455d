"""The copy paths, one contract: kernel for loads, staged for stores, dma where neither can be used.

A path queues one job on a stream. It owns its staging memory; the engine orders the streams.
"""
