"""The copy kernel: compiled, launched, and given the tables and ids it reads.

Owns compiled code, tables and id buffers on the device; leaves streams and order to the paths.
"""
