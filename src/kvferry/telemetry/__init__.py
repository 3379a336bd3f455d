"""What kvferry counts, under names that stay: for Prometheus, dashboards and ``kvferry top``.

Reading costs the reader: the scheduler only counts, and a snapshot is taken when one is wanted,
once for all clients that wait for it. Deciding what is cached is not this package's job.
"""

DEFAULT_PORT = 9475
