"""The view of a running kvferry from outside, through its metrics endpoint or vLLM's.

Owns the requests to an endpoint, the checks of its answers, and the live page. Trusts no answer.
Leaves the terminal to ``kvferry.tools.cli``.
"""
