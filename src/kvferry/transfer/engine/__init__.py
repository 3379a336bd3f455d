"""The copy engines, GPU and CPU: order copies around compute, and give a receipt for each."""
