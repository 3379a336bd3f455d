"""What kvferry counts, under names that stay: for Prometheus, dashboards and ``kvferry top``.

Reading costs the reader. The scheduler only counts; a snapshot is taken when someone asks for one,
once for all who wait for it.
"""

DEFAULT_PORT = 9475
