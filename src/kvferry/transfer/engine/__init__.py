"""Copy engines: they order copies and compute, and give one receipt per transfer.

Owns streams, events and the threads that queue copies; leaves the copying to the copy paths.
"""
