"""The real control plane and the real agents in virtual time, under faults, with every invariant checked.

One seed is one history: what the event loop does next, which call fails and what people do all follow from it.
"""
