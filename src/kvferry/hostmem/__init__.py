"""Host memory: its size, mapping, growth in the background, NUMA placement, sharing by ranks.

Owns the memory of the slots and its registrations; knows nothing of keys, leases or copies.
"""
