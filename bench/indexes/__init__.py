"""What the index benchmark compares with."""
