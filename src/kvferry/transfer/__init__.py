"""Copies between device memory and host slots: layouts, driver, kernels, copy paths, copy engines.

Owns streams, events and staging memory. Knows nothing of keys, requests or policies, and never
calls back into a higher package: it returns receipts.
"""
