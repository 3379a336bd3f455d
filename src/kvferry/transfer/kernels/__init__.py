"""The copy kernel: its code, compilation and launch, and the tables and ids that it reads.

Owns compiled code, tables and id buffers on the device; leaves streams and order to the paths.
"""
