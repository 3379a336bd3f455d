"""The view of a running kvferry from outside, through its metrics endpoint or vLLM's.

It owns the requests to an endpoint, the checks of its answers, and the live page. It trusts no
answer, and leaves the terminal to ``kvferry.tools.cli``.
"""
