"""Blocks in a store that servers share, Mooncake or S3, carried by a child process.

Owns the names and seals of objects, the clients of the stores, and the health of the connection;
what is stored there, and when, is left to ``scheduler``.
"""
