"""What each setting accepts and where it comes from."""
