"""Parts of ``bench/disk.py``."""
