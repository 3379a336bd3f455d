"""The copy kernel: compiled, launched, and given the tables and ids it reads."""
