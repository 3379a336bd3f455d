"""Which blocks are kept where: index, slots, leases, pins, quotas, eviction. No I/O, no threads."""
