"""Where bytes rest below the device: the contract, host memory, and the reference tiers."""
