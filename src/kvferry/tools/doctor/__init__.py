"""Is this machine fit for kvferry? Facts are read in one place, judged in others."""
