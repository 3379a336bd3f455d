"""The copy benchmark: what it measures and against what. Tables and plots are the CLI's."""
