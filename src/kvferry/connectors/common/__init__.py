"""The engine-neutral session: one scheduler side, and one worker side on every rank.

It handles request ids, keys and block tables. It leaves an engine's objects and hooks to the
folder of that engine, and decisions about the cache to ``kvferry.scheduler``.
"""
