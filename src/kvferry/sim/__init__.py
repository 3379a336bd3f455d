"""Simulation of eviction policies and capacities on a trace of requests.

Owns the replay of requests without bytes, the scores, and the bound of a policy that knows the
future. Leaves traces to ``kvferry.telemetry.traces``, policies to ``kvferry.cache.policies``.
"""
