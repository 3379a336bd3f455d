"""Other designs, rebuilt from what was published of them, to be timed beside ours."""
