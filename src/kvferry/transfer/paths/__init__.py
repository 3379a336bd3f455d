"""The ways to copy: each takes a job and queues all of it on a stream."""
