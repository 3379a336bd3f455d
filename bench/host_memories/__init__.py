"""Parts of ``bench/host_memory.py``."""
