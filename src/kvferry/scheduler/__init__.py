"""The scheduler half: owns requests, transfers, promotion and writeback; plans go out, receipts in.

It decides which blocks move and never touches a byte; which block lies where is the pools' to know.
"""
