"""The engine-neutral session: one scheduler side, and one worker side on every rank.

It speaks of request ids, keys and block tables; an engine's objects and hooks belong to the
folder that translates them, and decisions about the cache belong to ``kvferry.scheduler``.
"""
