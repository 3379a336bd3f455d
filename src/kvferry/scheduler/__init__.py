"""The scheduler half: owns requests, transfers, promotion and writeback; plans out, receipts in.

It decides which blocks move and never touches their bytes. The pools know which slot has a block.
"""
