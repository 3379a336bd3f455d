"""Copy engines: the order of copies and compute, and one receipt per transfer.

Owns streams, events and the threads that queue copies; leaves how to copy to the paths.
"""
