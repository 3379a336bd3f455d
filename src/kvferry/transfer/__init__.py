"""Devices: where a block lies on one, and how it gets to and from host slots, by which path."""
