"""Blocks in a store that servers share: S3, Mooncake."""
