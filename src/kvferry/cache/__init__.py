"""Which blocks are kept where: keys, slots, leases, pins, quotas and eviction. No I/O, no threads."""
