"""The tier in a store that servers share, Mooncake or a bucket, carried by a child process.

Owns the names and seals of objects, the clients of the stores, and the health of the connection.
Leaves what is stored there, and when, to ``scheduler``.
"""
