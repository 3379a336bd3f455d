"""Simulation of eviction policies and sizes on a trace of requests, and the all-knowing bound.

It owns the replay of requests without bytes and the scores. It leaves the format of traces to
``kvferry.telemetry.traces`` and the policies to ``kvferry.cache.policies``.
"""
