"""Host memory: sized, mapped, made usable in the background, near the GPU, shared by ranks.

Owns the memory of the slots and its registrations; knows nothing of keys, leases or copies.
"""
