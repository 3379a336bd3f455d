"""The copy paths, one contract: loop, dma, kernel, staged.

A path queues one job on a stream. It owns its staging memory; the engine orders the streams.
"""
