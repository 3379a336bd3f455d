"""What every other package stands on: identity, keys, quantities, lifecycle."""
