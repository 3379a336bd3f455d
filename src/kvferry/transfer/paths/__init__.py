"""The copy paths: ``kernel`` for loads, ``staged`` for stores, ``dma`` if kernels cannot be used.

A path queues one job on a stream. It owns its staging memory; the engine orders the streams.
"""
