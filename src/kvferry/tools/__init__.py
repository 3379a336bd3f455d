"""Commands, diagnosis and demonstrations for people."""
