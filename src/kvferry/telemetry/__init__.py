"""Metrics under stable names, explanations of requests, recordings, and the HTTP endpoint.

The scheduler only counts. A snapshot is taken when a client asks, and the HTTP thread formats it.
Leaves decisions about what is cached to ``scheduler`` and ``cache``.
"""

DEFAULT_PORT = 9475
