"""Looking at a running kvferry from outside, through its metrics endpoint or vLLM's."""
