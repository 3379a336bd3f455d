"""Which path for which transfer: measured on this machine, kept, and explained."""
