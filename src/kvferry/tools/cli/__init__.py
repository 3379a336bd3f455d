"""The `kvferry` command: one file per command, each imported only when it is run."""
